"""A run's settings: `RunConfig`, read from a preset, a TOML file and `--set` options. Needs no torch."""

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from glm5_next.launchers import config_sections as sections
from glm5_next.launchers.config_rollout import RolloutSection, rollout_conflicts


class RunConfig(sections.Section):
    """All settings of one training run. Sections of a file are the fields; `describe` writes them back."""

    model: sections.ModelSection
    parallel: sections.ParallelSection = Field(default_factory=sections.ParallelSection)
    data: sections.DataSection
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    grpo: sections.GrpoSection = Field(default_factory=sections.GrpoSection)
    optimizer: sections.OptimizerSection = Field(default_factory=sections.OptimizerSection)
    replay: sections.ReplaySection = Field(default_factory=sections.ReplaySection)
    train: sections.TrainSection = Field(default_factory=sections.TrainSection)
    output: sections.OutputSection = Field(default_factory=sections.OutputSection)

    @model_validator(mode="after")
    def _settings_agree(self) -> "RunConfig":
        conflicts = list(_conflicts(self))
        if conflicts:
            raise ValueError("\n".join(conflicts))
        return self


class Setting(NamedTuple):
    """One value that somebody wrote, and where."""

    value: Any
    source: str


def settings() -> dict[str, FieldInfo]:
    """Every setting by its dotted key ("train.steps"), in the order of a file."""
    return {
        f"{name}.{key}": field
        for name, section in RunConfig.model_fields.items()
        for key, field in _section_type(section).model_fields.items()
    }


def load_run_config(path: Path | None, preset: Mapping[str, Any] | None, overrides: Sequence[str]) -> RunConfig:
    """The settings of a preset, then of a TOML file, then of `section.key=value` texts; the later one wins.

    Raises one ValueError that names, for every problem, the key, its value, where it came from and what is allowed.
    """
    written: dict[str, Setting] = {}
    problems: list[str] = []
    layers = [(preset or {}, "the preset")]
    if path is not None:
        layers.append((_read_toml(path), str(path)))
    layers += [(_parse_override(text), "--set") for text in overrides]
    for values, source in layers:
        for key, value in _flatten(values):
            problem = _key_problem(key, value)
            if problem:
                problems.append(f"{source}: {problem}")
            written[key] = Setting(value, source)
    if problems:
        raise ValueError("\n".join(problems))
    return _validate(written)


def describe(config: RunConfig) -> str:
    """The resolved settings, every one of them, as a TOML file that `load_run_config` reads back as `config`."""
    lines = []
    for name, section in config:
        lines.append(f"[{name}]")
        lines += [f"{key} = {_to_toml(value)}" for key, value in section]
        lines.append("")
    return "\n".join(lines)


def with_absolute_paths(run: RunConfig) -> RunConfig:
    """Paths that mean the same from any folder the run is resumed in."""

    def absolute(prompts: str | None) -> str | None:
        return prompts if prompts in (None, "tiny") else str(Path(prompts).resolve())

    converted = run.model.megatron_checkpoint
    model = run.model.model_copy(
        update={
            "checkpoint": run.model.checkpoint.resolve(),
            "megatron_checkpoint": None if converted is None else converted.resolve(),
        }
    )
    data = {"prompts": absolute(run.data.prompts), "heldout": absolute(run.data.heldout)}
    return run.model_copy(update={"model": model, "data": run.data.model_copy(update=data)})


def _section_type(field: FieldInfo) -> type[BaseModel]:
    assert isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    return field.annotation


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid TOML ({error})") from None


def _parse_override(text: str) -> dict[str, Any]:
    key, equals, value_text = (part.strip() for part in text.partition("="))
    if not key or not equals or not value_text:
        raise ValueError(f"--set {text}: expected section.key=value, for example train.steps=10")
    value: Any = value_text
    try:
        parsed = tomllib.loads(f"value = {value_text}")
    except tomllib.TOMLDecodeError:
        pass  # a bare string, such as a path; the setting's type decides whether that is right
    else:
        value = parsed["value"] if len(parsed) == 1 else value_text
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _flatten(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every setting; a section that is empty, or no section at all, comes as itself."""
    for name, section in values.items():
        if isinstance(section, Mapping) and section:
            yield from ((f"{name}.{key}", value) for key, value in section.items())
        elif section != {} or name not in RunConfig.model_fields:
            yield name, section


def _key_problem(key: str, value: Any) -> str | None:
    known = settings()
    if key in known:
        return None
    if key in RunConfig.model_fields:
        return f"{key!r} is a section and cannot be set to {value!r}; it has {', '.join(_keys_of(key))}"
    nearest = _nearest(key)
    if nearest is not None:
        return f"unknown key {key!r}; the nearest is {nearest!r}"
    section = key.partition(".")[0]
    if section in RunConfig.model_fields:
        return f"unknown key {key!r}; section {section!r} has {', '.join(_keys_of(section))}"
    return f"unknown key {key!r}; the sections are {', '.join(RunConfig.model_fields)}"


def _nearest(key: str) -> str | None:
    """The setting (or section) that was probably meant; a right name in the wrong section counts first."""
    by_name = {dotted.partition(".")[2]: dotted for dotted in settings()}
    last = key.rpartition(".")[2]
    if last in by_name:
        return by_name[last]
    # a key without a section may be a section or a setting whose section was forgotten
    meant = (
        {dotted: dotted for dotted in settings()}
        if "." in key
        else {**by_name, **{s: s for s in RunConfig.model_fields}}
    )
    close = difflib.get_close_matches(key, meant, n=1)
    return meant[close[0]] if close else None


def _keys_of(section: str) -> list[str]:
    return list(_section_type(RunConfig.model_fields[section]).model_fields)


def _validate(written: Mapping[str, Setting]) -> RunConfig:
    nested: dict[str, dict[str, Any]] = {"model": {}, "data": {}}
    for dotted, setting in written.items():
        section, _, key = dotted.partition(".")
        nested.setdefault(section, {})[key] = setting.value
    try:
        return RunConfig.model_validate(nested)
    except ValidationError as error:
        raise ValueError("\n".join(_explain(problem, written) for problem in error.errors())) from None


def _explain(problem: Any, written: Mapping[str, Setting]) -> str:
    """One pydantic error in words a user of the file knows."""
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return message
    dotted = ".".join(str(part) for part in problem["loc"][:2])
    meaning = settings()[dotted].description
    if dotted not in written:
        return f"{dotted} is not set: {meaning}"
    value, source = written[dotted]
    return f"{source}: {dotted} is {value!r}: {message[0].lower()}{message[1:]} ({meaning})"


def _conflicts(config: RunConfig) -> Iterator[str]:
    """Settings that are fine alone and wrong together, each with its dotted key."""
    grpo, optimizer, rollout, train = config.grpo, config.optimizer, config.rollout, config.train
    yield from _topology_conflicts(config.parallel)
    if config.model.precision == "bf16" and not config.parallel.distributed_optimizer:
        yield (
            "model.precision is 'bf16' but parallel.distributed_optimizer is false: a bf16 model keeps some parameters in "
            "fp32, and Megatron's plain optimizer cannot save such a mix"
        )
    if optimizer.offload and not config.parallel.distributed_optimizer:
        yield (
            "optimizer.offload is true but parallel.distributed_optimizer is false: Megatron offloads the distributed "
            "optimizer only"
        )
    if grpo.is_low > grpo.is_high:
        yield f"grpo.is_low ({grpo.is_low}) exceeds grpo.is_high ({grpo.is_high})"
    if config.replay.routing_weights == "engine" and config.replay.routing != "engine":
        yield (
            f"replay.routing_weights is 'engine' but replay.routing is {config.replay.routing!r}: the engine's weights "
            "belong to the engine's experts"
        )
    if config.replay.routing_weights == "engine" and rollout.engine != "transformers":
        yield (
            f"replay.routing_weights is 'engine' but rollout.engine is {rollout.engine!r}, which hands over no weights "
            "of experts"
        )
    if optimizer.min_lr > optimizer.lr:
        yield f"optimizer.min_lr ({optimizer.min_lr}) exceeds optimizer.lr ({optimizer.lr})"
    if optimizer.warmup_steps > train.steps:
        yield f"optimizer.warmup_steps ({optimizer.warmup_steps}) exceeds train.steps ({train.steps})"
    yield from rollout_conflicts(rollout, config.parallel.ranks)
    if rollout.one_step_off and grpo.importance_sampling == "off":
        yield (
            "rollout.one_step_off is true but grpo.importance_sampling is 'off': samples of older weights would be trained "
            "on as if they were of the current ones"
        )
    if grpo.mini_batches > rollout.prompts_per_step:
        yield (
            f"grpo.mini_batches ({grpo.mini_batches}) exceeds rollout.prompts_per_step ({rollout.prompts_per_step}): "
            "a group is never split over updates"
        )
    if train.tokens_per_micro_batch < rollout.max_new_tokens:
        yield (
            f"train.tokens_per_micro_batch ({train.tokens_per_micro_batch}) is below rollout.max_new_tokens "
            f"({rollout.max_new_tokens}): the longest response would not fit into a row"
        )
    if train.eval_every and config.data.heldout is None:
        yield f"train.eval_every is {train.eval_every} but data.heldout is not set"


def _topology_conflicts(parallel: sections.ParallelSection) -> Iterator[str]:
    for key, sizes in (("ranks", parallel.model_copy(update={"vpp": None})), ("vpp", parallel)):
        try:
            sizes.topology()
        except ValueError as error:
            yield f"parallel.{key}: {error}"
            return


def _to_toml(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, tuple):
        return f"[{', '.join(_to_toml(item) for item in value)}]"
    if isinstance(value, (str, Path)):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)
