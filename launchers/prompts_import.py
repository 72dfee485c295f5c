"""Prompt files of other projects, in our form (see `prompts`): dapo-math-17k in both of its layouts. Needs no torch.

zhuzilin/dapo-math-17k has lines {"prompt": [messages], "label": text}; the original, BytedTsinghua-SIA/DAPO-Math-17k, has
{"prompt": [messages], "reward_model": {"ground_truth": text}, "extra_info": {"index": text}} and repeats its prompts; it
comes as Parquet, which is refused with the command that makes JSONL of it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from glm5_next.launchers.atomic_write import write_atomic
from glm5_next.launchers.prompts import digest, read_lines, read_prompts


def import_prompts(source: Path, out: Path) -> int:
    """Writes the prompts of a file, in our form or one of the layouts above, to `out`; returns their number.

    Prompts that repeat an earlier one's text and answer are left out. Raises ValueError that names file and line, and if
    `out` exists with other prompts.
    """
    records = []
    for number, line in enumerate(read_lines(source), start=1):
        try:
            records.append(_ours(json.loads(line), f"{source.stem}:{number}"))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{source}:{number}: {error}") from None
    new = out.with_name(f".{out.name}.new")
    try:
        _write(new, records)
        read_prompts(new)  # before anything is left out: a fault is named by its line
        _write(new, _without_repetitions(records))
        prompts = read_prompts(new)
        if out.exists() and digest(read_prompts(out)) != digest(prompts):
            raise ValueError(f"{out}: exists with other prompts than {source}; remove it or set data.prompts")
        new.rename(out)
    except ValueError as error:
        raise ValueError(str(error).replace(str(new), str(source))) from None
    finally:
        new.unlink(missing_ok=True)
    return len(prompts)


def _write(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    write_atomic(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode())


def _without_repetitions(records: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    seen = set()
    for record in records:
        key = json.dumps([record.get("prompt"), record.get("messages"), record["answer"]])
        if key not in seen:
            seen.add(key)
            yield record


def _ours(record: Any, default_id: str) -> dict[str, Any]:
    if not isinstance(record, Mapping):
        raise ValueError(f"expected an object, got {str(record)[:40]!r}")
    if "answer" in record:
        return {"id": default_id, **record}
    prompt = record.get("prompt")
    content = {"messages": [dict(m) for m in prompt]} if isinstance(prompt, list) else {"prompt": prompt}
    if "label" in record:
        return {"id": default_id, **content, "answer": record["label"]}
    if "reward_model" in record:
        return {"id": default_id, **content, "answer": record["reward_model"].get("ground_truth")}
    raise ValueError("has none of the keys 'answer' (our form), 'label', 'reward_model' (dapo-math-17k)")
