"""One safetensors file: its header read strictly, a planned file written in place. Needs no torch.

Nothing here trusts a file: a header is checked against the size of its file before any tensor is allocated, and only
JSON is parsed. Layout: 8 bytes with the header's length, the header (JSON), then the tensors without gaps.
"""

import errno
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from glm5_next.bridge.name_map import TensorInfo

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SHARD_NAME = re.compile(r"[A-Za-z0-9][\w.-]*\.safetensors", re.ASCII)
MAX_JSON_BYTES = 100_000_000  # the safetensors library's own limit for a header
MAX_DIMS = 16
# copy_file_range between these file systems is not possible.
NOT_IN_KERNEL = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
COPY_BYTES = 4 * 2**20  # at a time, where a copy has to pass through memory
ITEM_SIZE = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies on disk: bytes begin..end, counted from the start of the shard `file`."""

    dtype: str  # as safetensors spells it: "BF16", "F32"
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int


@dataclass(frozen=True)
class ShardPlan:
    """A shard before its tensors are there: the first bytes of the file, and the place of every tensor."""

    file: str
    header: bytes  # with the 8 bytes of its length
    tensors: Mapping[str, Stored]

    @property
    def num_bytes(self) -> int:
        """Size of the whole file."""
        return max((stored.end for stored in self.tensors.values()), default=len(self.header))


def resolve_inside(folder: Path, name: str) -> Path:
    """`folder / name`, known to be a regular file of the checkpoint folder.

    Raises ValueError if it is absent, or a link that leads out of the folder. Links into the blobs of the Hugging Face
    cache that the folder is a snapshot of are followed: that is how the cache stores every file.
    """
    path, root = (folder / name).resolve(), folder.resolve()
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    if not any(path.is_relative_to(allowed) for allowed in roots):
        raise ValueError(f"{folder / name}: leads out of the checkpoint folder (to {path}); refused")
    if not path.is_file():
        raise ValueError(f"{folder / name}: no such file; the checkpoint is incomplete, download it again")
    return folder / name


def parse_json(data: bytes, where: Path | str) -> dict[str, Any]:
    """A JSON object without duplicate keys; raises ValueError naming `where` for anything else."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = set()
        for key, _ in pairs:
            if key in keys:
                raise ValueError(f"key {key!r} appears twice")
            keys.add(key)
        return dict(pairs)

    try:
        content = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON ({error})") from None
    if type(content) is not dict:
        raise ValueError(f"{where}: expected a JSON object, found {type(content).__name__}")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of at most MAX_JSON_BYTES, strictly."""
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{path}: {path.stat().st_size} bytes; a JSON file above {MAX_JSON_BYTES} bytes is refused")
    return parse_json(path.read_bytes(), path)


def read_header(path: Path) -> bytes:
    """The first bytes of a safetensors file: 8 bytes of length and the header, checked against the file's size."""
    actual = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) == 8 and length > MAX_JSON_BYTES:
            raise ValueError(f"{path}: claims a header of {length} bytes; more than {MAX_JSON_BYTES} is refused")
        if actual < 8 + length:
            expected = f"at least {8 + length}" if len(prefix) == 8 else "at least 8"
            raise ValueError(f"{path}: truncated, has {actual} bytes, needs {expected}; download it again")
        return prefix + file.read(length)


def read_tensors(path: Path, file: str) -> tuple[dict[str, Stored], dict[str, str]]:
    """Tensors (in file order) and metadata of a shard from its header, checked against the file's size in bytes.

    `file` is the shard's name in the folder. Raises ValueError that names the file and the tensor.
    """
    header = read_header(path)
    entries = parse_json(header[8:], path)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{path}: __metadata__ must map names to strings")
    tensors = {name: _stored(path, file, name, entry, len(header)) for name, entry in entries.items()}
    tensors = dict(sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)))
    _check_extent(path, tensors, len(header))
    return tensors, metadata


def _stored(path: Path, file: str, name: str, entry: Any, start: int) -> Stored:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{where}: a header entry needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZE:
        raise ValueError(f"{where}: dtype {dtype!r} is unknown; known are {sorted(ITEM_SIZE)}")
    for key, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError(f"{where}: {key} must be a list of non-negative integers, got {numbers!r}")
        if len(numbers) > MAX_DIMS:
            raise ValueError(f"{where}: {key} has {len(numbers)} entries; more than {MAX_DIMS} are refused")
    size = math.prod(shape) * ITEM_SIZE[dtype]
    if len(offsets) != 2 or offsets[1] - offsets[0] != size:
        raise ValueError(f"{where}: data_offsets {offsets} do not hold the {size} bytes of {dtype} {shape}")
    return Stored(dtype, tuple(shape), file, start + offsets[0], start + offsets[1])


def _check_extent(path: Path, tensors: Mapping[str, Stored], start: int) -> None:
    end, before = start, "the header"
    for name, stored in tensors.items():
        if stored.begin != end:
            problem = "overlaps" if stored.begin < end else "leaves a gap after"
            raise ValueError(f"{path}: tensor {name!r} at byte {stored.begin} {problem} {before} (ends at {end})")
        end, before = stored.end, repr(name)
    actual = path.stat().st_size
    if actual < end:
        raise ValueError(f"{path}: truncated, has {actual} bytes, needs {end}; download it again")
    if actual > end:
        raise ValueError(f"{path}: has {actual} bytes but its header describes {end}; download it again")


def plan_shard(file: str, tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> ShardPlan:
    """Plans a shard that holds `tensors` in the given order."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset, places = 0, {}
    for name, info in tensors.items():
        end = offset + math.prod(info.shape) * ITEM_SIZE[info.dtype]
        entries[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [offset, end]}
        places[name] = (info, offset, end)
        offset = end
    body = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    body += b" " * (-len(body) % 8)  # tensors start at a multiple of 8 bytes, as the safetensors library writes them
    header = len(body).to_bytes(8, "little") + body
    start = len(header)
    stored = {n: Stored(info.dtype, info.shape, file, start + b, start + e) for n, (info, b, e) in places.items()}
    return ShardPlan(file, header, stored)


def plan_shards(tensors: Mapping[str, TensorInfo], num_shards: int) -> list[ShardPlan]:
    """Cuts the tensors, in name order, into shards of about equal size; inside a shard wide dtypes come first."""
    sizes = {name: math.prod(info.shape) * ITEM_SIZE[info.dtype] for name, info in sorted(tensors.items())}
    total, before = sum(sizes.values()), 0
    groups: dict[int, list[str]] = {}
    for name, size in sizes.items():
        groups.setdefault(before * num_shards // total, []).append(name)
        before += size
    plans = []
    for number, names in enumerate(groups.values(), start=1):
        ordered = sorted(names, key=lambda name: (-ITEM_SIZE[tensors[name].dtype], name))
        file = SINGLE_FILE.replace(".", f"-{number:05}-of-{len(groups):05}.", 1)
        plans.append(plan_shard(file, {name: tensors[name] for name in ordered}, {"format": "pt"}))
    return plans


def create_shards(folder: Path, plans: Iterable[ShardPlan]) -> None:
    """Creates files of full size with their headers; what is there already keeps its tensors, whoever made it."""
    for plan in plans:
        descriptor = os.open(folder / plan.file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            transfer(partial(os.pwrite, descriptor), memoryview(plan.header), 0, plan.file)
            os.ftruncate(descriptor, plan.num_bytes)
        finally:
            os.close(descriptor)


class ShardWriter:
    """Writes tensors into created shards in any order, at their place in the file: nothing is buffered."""

    def __init__(self, folder: Path, plans: Iterable[ShardPlan]):
        self.folder = folder
        self.tensors: dict[str, Stored] = {name: stored for plan in plans for name, stored in plan.tensors.items()}
        self.written: set[str] = set()

    def write(self, name: str, pieces: Iterable[Any]) -> None:
        """Writes a tensor's bytes, given as byte buffers in order. Raises ValueError if unknown, repeated or of other size."""
        stored = self._take(name)
        position = stored.begin
        with (self.folder / stored.file).open("r+b", buffering=0) as file:
            for piece in pieces:
                view = memoryview(piece)
                if position + len(view) > stored.end:
                    raise ValueError(f"{name}: more than the planned {stored.end - stored.begin} bytes were given")
                transfer(lambda part, at: os.pwrite(file.fileno(), part, at), view, position, name)
                position += len(view)
        self._finished(name, position)

    def copy(self, name: str, spans: Iterable[tuple[Path, int, int]]) -> None:
        """Writes a tensor from (file, begin, bytes) spans of other files. Raises ValueError as `write` does."""
        stored = self._take(name)
        position = stored.begin
        with (self.folder / stored.file).open("r+b", buffering=0) as target:
            for path, begin, count in spans:
                if position + count > stored.end:
                    raise ValueError(f"{name}: more than the planned {stored.end - stored.begin} bytes were given")
                with path.open("rb", buffering=0) as source:
                    copy_range(source.fileno(), begin, target.fileno(), position, count, f"{path}: tensor {name!r}")
                position += count
        self._finished(name, position)

    def _take(self, name: str) -> Stored:
        if name not in self.tensors:
            raise ValueError(f"{name}: the checkpoint has no such tensor")
        if name in self.written:
            raise ValueError(f"{name}: written twice")
        return self.tensors[name]

    def _finished(self, name: str, position: int) -> None:
        stored = self.tensors[name]
        if position != stored.end:
            raise ValueError(f"{name}: {position - stored.begin} of {stored.end - stored.begin} bytes were given")
        self.written.add(name)

    def check_complete(self) -> None:
        """Raises ValueError that names the tensors which were not written."""
        if missing := sorted(set(self.tensors) - self.written):
            raise ValueError(f"{len(missing)} tensors were never written: {shorten(missing)}")


def transfer(move: Callable[[memoryview, int], int], view: memoryview, position: int, what: str) -> None:
    """Moves all bytes of `view` at a file position, by preadv or pwrite, which may stop early."""
    while len(view):
        if not (count := move(view, position)):
            raise ValueError(f"{what}: the file ends at byte {position}; it was changed after its header was read")
        view, position = view[count:], position + count


def copy_range(source: int, begin: int, target: int, at: int, count: int, what: str) -> None:
    """Copies bytes between open files, inside the kernel where the file systems can."""
    while count:
        try:
            copied = os.copy_file_range(source, target, count, begin, at)
        except OSError as error:
            if error.errno not in NOT_IN_KERNEL:
                raise
            copied = min(count, COPY_BYTES)
            view = memoryview(bytearray(copied))
            transfer(lambda part, position: os.preadv(source, [part], position), view, begin, what)
            transfer(partial(os.pwrite, target), view, at, what)
        if not copied:
            raise ValueError(f"{what}: the file ends at byte {begin}; it was changed after its header was read")
        begin, at, count = begin + copied, at + copied, count - copied


def shorten(names: Iterable[str], limit: int = 10) -> str:
    """The first names of a list, and how many more there are."""
    names = list(names)
    more = f", ... ({len(names) - limit} more)" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
