"""Prompt files (JSONL) and the order in which prompts are drawn. Needs no torch."""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from glm5_next.launchers.types import Prompt

ROLES = ("system", "user", "assistant", "tool")


PARQUET = b"PAR1"  # how such a file begins
TO_JSONL = "import json, pyarrow.parquet as p; [print(json.dumps(row)) for row in p.read_table('FILE').to_pylist()]"


def read_lines(path: Path) -> list[bytes]:
    """Of a JSONL file, without their ends. Raises ValueError for what cannot be read, and for Parquet."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    if lines[0].startswith(PARQUET):
        raise ValueError(
            f"{path}: is Parquet, prompts are read from JSONL; with pyarrow installed somewhere this makes it: "
            f'python -c "{TO_JSONL.replace("FILE", str(path))}" > {path.stem}.jsonl'
        )
    return lines[:-1] if lines[-1] == b"" else lines


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a JSONL file, in file order, or one ValueError that names file, line and fault.

    Each line is an object with `prompt` (text) or `messages` (list of {"role", "content"}), `answer` (text or number)
    and optionally `id` (text or whole number; default "<file stem>:<line>"). Other keys are ignored.
    """
    lines = read_lines(path)
    prompts: list[Prompt] = []
    first_lines: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        try:
            prompt = _prompt(_record(line), default_id=f"{path.stem}:{number}")
            if prompt.id in first_lines:
                raise ValueError(f"id {prompt.id!r} is already used in line {first_lines[prompt.id]}")
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
        first_lines[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path}: holds no prompt")
    return prompts


def digest(prompts: Sequence[Prompt]) -> str:
    """SHA-256 of prompts and their order: a run that resumes on other data can be told apart."""
    content = [[prompt.id, prompt.text, prompt.answer, prompt.messages] for prompt in prompts]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class PromptCursor:
    """Endless draws from a list of prompts, as a function of a position.

    A position is the number of prompts drawn since the run began, so a resumed run needs nothing but that number.
    With `shuffle` every epoch has its own order, derived from seed and epoch; each prompt comes once per epoch.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool) -> None:
        if not prompts:
            raise ValueError("there is no prompt to draw from")
        self.prompts = tuple(prompts)
        self.seed = seed
        self.shuffle = shuffle

    def take(self, n: int, cursor: int) -> tuple[list[Prompt], int]:
        """The n prompts from position `cursor` on, and the position after them."""
        if n < 0 or cursor < 0:
            raise ValueError(f"cannot draw {n} prompts from position {cursor}")
        return [self._at(position) for position in range(cursor, cursor + n)], cursor + n

    def _at(self, position: int) -> Prompt:
        epoch, place = divmod(position, len(self.prompts))
        return self.prompts[_epoch_order(len(self.prompts), self.seed, epoch)[place] if self.shuffle else place]


@lru_cache(maxsize=4)
def _epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    # random() is the one method whose sequence Python promises to keep; shuffle() may change between versions
    keys = random.Random(f"{seed}/{epoch}")
    return sorted(range(count), key=[keys.random() for _ in range(count)].__getitem__)


def _record(line: bytes) -> Mapping[str, Any]:
    if not line.strip():
        raise ValueError("empty line")
    try:
        record = json.loads(line.decode("utf-8"), parse_float=Decimal, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(record, Mapping):
        raise ValueError(f"expected an object, got {line.decode()[:40]!r}")
    return record


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that JSON has")


def _prompt(record: Mapping[str, Any], default_id: str) -> Prompt:
    if ("prompt" in record) == ("messages" in record):
        raise ValueError("needs either 'prompt' or 'messages'" + (", not both" if "prompt" in record else ""))
    messages = _messages(record["messages"]) if "messages" in record else None
    text = "\n".join(message["content"] for message in messages) if messages else _text(record["prompt"], "prompt")
    if "answer" not in record:
        raise ValueError("key 'answer' is missing")
    return Prompt(
        id=_text_or_number(record.get("id", default_id), "id"),
        text=text,
        answer=_text_or_number(record["answer"], "answer"),
        messages=messages,
    )


def _messages(value: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"messages must be a list of objects with role and content, got {value!r}")
    for index, message in enumerate(value):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise ValueError(f"messages[{index}] must be an object with exactly role and content, got {message!r}")
        if message["role"] not in ROLES:
            raise ValueError(f"messages[{index}].role must be one of {', '.join(ROLES)}, got {message['role']!r}")
        _text(message["content"], f"messages[{index}].content")
    return tuple(value)


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key} must be a text that is not empty, got {value!r}")
    return value


def _text_or_number(value: Any, key: str) -> str:
    if isinstance(value, Decimal):
        return format(value, "f")  # 0.50 stays "0.50", 1e3 becomes "1000"
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return _text(value, key)
