"""FP8 in and out: values, ragged blocks, scales without tensors and tensors without scales, and whole conversions."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.closeness import closeness
from glm5_next.bridge.dist_names import regions
from glm5_next.bridge.dist_read import DistCheckpoint
from glm5_next.bridge.fp8 import dequantize, quantize
from glm5_next.bridge.hf_folder import HfFolderWriter
from glm5_next.bridge.name_map import model_tensors
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.bridge.values import read_values
from glm5_next.bridge.verify import compare
from glm5_next.launchers.runtime.convert import hf_to_megatron, megatron_to_hf

INDEX = "model.safetensors.index.json"
NAME = "model.language_model.layers.3.self_attn.o_proj.weight"
SHAPES = [(128, 128), (256, 384), (1, 1), (129, 127), (300, 5), (127, 513)]


def truth(codes: Tensor, scales: Tensor) -> Tensor:
    """Element by element, in double precision: every product of a code and a scale is exact there."""
    rows, columns = (torch.arange(size) // 128 for size in codes.shape)
    return codes.double() * scales.double()[rows[:, None], columns[None]]


def random_codes(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Every finite e4m3 code, and positive scales."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    bits[bits & 0x7F == 0x7F] = 0x7E
    scales = torch.rand([-(-size // 128) for size in shape], generator=generator) + 1e-3
    return bits.view(torch.float8_e4m3fn), scales


@pytest.mark.parametrize("shape", SHAPES)
def test_values_are_codes_times_the_scale_of_their_block(shape):
    codes, scales = random_codes(shape)
    out = torch.empty(shape)
    dequantize(codes, scales, out)
    assert torch.equal(out, truth(codes, scales).float())


def test_every_code_is_its_number():
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes & 0x7F != 0x7F].view(torch.float8_e4m3fn).view(1, -1)
    out = torch.empty(codes.shape)
    dequantize(codes, torch.ones(1, 2), out)
    assert torch.equal(out, codes.float())


@pytest.mark.parametrize(("row", "column"), [(0, 0), (100, 0), (0, 200), (130, 77), (255, 300)])
def test_a_part_is_scaled_by_where_it_lies_in_the_whole(row, column):
    codes, scales = random_codes((300, 400))
    part, out = codes[row : row + 45, column : column + 90], torch.empty(45, 90)
    dequantize(part.contiguous(), scales, out, row=row, column=column)
    assert torch.equal(out, truth(codes, scales).float()[row : row + 45, column : column + 90])


@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_weights_that_came_from_fp8_go_back_to_the_same_codes_and_scales(shape):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    codes, scales = quantize(values)
    again = torch.empty(shape, dtype=torch.bfloat16)
    dequantize(codes, scales, again)
    found = quantize(again)
    assert torch.equal(found[0].view(torch.uint8), codes.view(torch.uint8)) and torch.equal(found[1], scales)
    error = (again.double() - values.double()).abs()
    assert (error <= 2**-4 * values.double().abs() + scales.max().item() * 2**-9).all()


def test_a_block_of_zeros_stays_one():
    codes, scales = quantize(torch.zeros(130, 3))
    assert not codes.float().any() and torch.equal(scales, torch.ones(2, 1))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_a_scale_that_is_no_scale_is_refused_by_name(bad):
    codes, scales = random_codes((5, 5))
    scales[0, 0] = bad
    with pytest.raises(ValueError, match="x_scale_inv: has a scale that is negative or not finite"):
        dequantize(codes, scales, torch.empty(5, 5), name="x")


def test_a_code_that_is_no_number_and_a_value_that_has_no_code_are_refused_by_name():
    codes, scales = random_codes((5, 5))
    codes.view(torch.uint8)[2, 2] = 0x7F
    with pytest.raises(ValueError, match="x: has an FP8 code that is no number"):
        dequantize(codes, scales, torch.empty(5, 5), name="x")
    with pytest.raises(ValueError, match="x: has values that are not finite"):
        quantize(torch.tensor([[math.inf]]), "x")


# Whole checkpoints. Hidden size and widths are no multiples of 128: most blocks end early.


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    sizes = {"layers": 4, "experts": 2, "hidden": 192, "expert_width": 160, "dense_width": 288, "q_lora": 144}
    return write_tiny_checkpoint(tmp_path_factory.mktemp("fp8") / "hf", fp8=True, **sizes)


@pytest.fixture(scope="module")
def converted(source) -> Path:
    hf_to_megatron(source, source.parent / "megatron")
    return source.parent / "megatron"


def dequantised(checkpoint: Checkpoint, name: str) -> Tensor:
    values = checkpoint.read(name)
    scales = f"{name}_scale_inv"
    return truth(values, checkpoint.read(scales)) if scales in checkpoint.tensors else values.double()


def test_every_megatron_parameter_is_the_number_that_the_files_say(source, converted):
    hf, dist = Checkpoint(source), DistCheckpoint(converted)
    fp8 = 0
    for entry in model_tensors(hf.config, mtp=True):
        for region in regions(entry, hf.config):
            found = torch.empty(region.shape, dtype=dist.dtypes[region.key])
            dist.read(region, found)
            rows = dequantised(hf, region.hf)[region.row : region.row + region.num_rows]
            assert torch.equal(found.view(rows.shape), rows.to(found.dtype)), region
            assert found.dtype == (torch.float32 if entry.row.fp32_in_model else torch.bfloat16)
            fp8 += hf.tensors[region.hf].dtype == "F8_E4M3"
    assert fp8 > 40


def test_fp8_comes_back_with_the_same_bits_and_the_same_set_of_quantised_tensors(source, converted, tmp_path):
    megatron_to_hf(converted, tmp_path / "back", None)
    comparison = compare(source, tmp_path / "back")
    assert comparison.equal, comparison.lines()[:5]
    assert "quantization_config" in Checkpoint(tmp_path / "back").raw_config


def test_bf16_comes_back_without_scales_and_says_so(source, converted, tmp_path):
    megatron_to_hf(converted, tmp_path / "back", None, "bfloat16")
    hf, back = Checkpoint(source), Checkpoint(tmp_path / "back")
    back.check_inventory()
    assert not any(name.endswith("_scale_inv") for name in back.tensors)
    assert "quantization_config" not in back.raw_config and not back.config.fp8
    for name in back.tensors:
        assert torch.equal(back.read(name).double(), dequantised(hf, name).to(back.read(name).dtype).double()), name


def test_parts_of_a_tensor_are_read_as_the_whole_is(source):
    hf = Checkpoint(source)
    whole = truth(hf.read(NAME), hf.read(NAME + "_scale_inv")).float()
    for row, rows, columns in ((0, 192, (0, 96)), (50, 90, (7, 96)), (130, 62, (48, 96))):
        out = torch.empty(rows, columns[1] - columns[0])
        read_values(hf, NAME, out, row=row, columns=columns)
        assert torch.equal(out, whole[row : row + rows, columns[0] : columns[1]])


def test_an_fp8_copy_is_close_in_numbers_and_only_the_quantised_tensors_are_off(source, tmp_path):
    plain = write_tiny_checkpoint(
        tmp_path / "bf16", layers=4, experts=2, hidden=192, expert_width=160, dense_width=288, q_lora=144
    )
    result = closeness(Checkpoint(plain), Checkpoint(source))
    off = [error.name for error in result.errors if error.relative > 0]
    quantised = [name for name, stored in Checkpoint(source).tensors.items() if stored.dtype == "F8_E4M3"]
    assert sorted(off) == sorted(quantised)
    assert result.within(0.05) and not result.within(0.01)
    assert result.errors[0].relative == max(error.relative for error in result.errors)


# Scales and tensors that do not belong together.


def damaged(source: Path, out: Path, change) -> Path:
    folder = Path(shutil.copytree(source, out))
    index = json.loads((folder / INDEX).read_text())
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)
        index["weight_map"] = {n: f for n, f in index["weight_map"].items() if f != path.name}
        index["weight_map"] |= dict.fromkeys(tensors, path.name)
    (folder / INDEX).write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(NAME + "_scale_inv", None), f"1 missing: {NAME}_scale_inv"),
        (lambda tensors: tensors.pop(NAME, None), f"1 missing: {NAME}"),
        (
            lambda tensors: (
                NAME in tensors and tensors.update({NAME[:-13] + "kv_b_proj.weight_scale_inv": torch.ones(2, 1)})
            ),
            "1 unexpected: ",
        ),
        (
            lambda tensors: NAME in tensors and tensors.update({NAME + "_scale_inv": torch.ones(1, 1)}),
            f"{NAME}_scale_inv is [1, 1], not [2, 1]",
        ),
        (
            lambda tensors: NAME in tensors and tensors.update({NAME: tensors[NAME].bfloat16()}),
            f"{NAME} is BF16, not F8_E4M3",
        ),
    ],
    ids=["no scale", "no tensor", "a scale too many", "a scale of other shape", "not quantised"],
)
def test_scales_and_tensors_that_do_not_belong_together_are_named_before_anything_is_written(
    source, tmp_path, change, message
):
    folder = damaged(source, tmp_path / "hf", change)
    with pytest.raises(ValueError) as error:
        hf_to_megatron(folder, tmp_path / "megatron")
    assert message in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_copy_into_bf16_is_the_dequantised_truth(source, tmp_path):
    hf = Checkpoint(source)
    with HfFolderWriter(tmp_path / "out", source=hf, dtype="bfloat16") as writer:
        writer.copy_from_source(name for name in hf.tensors if not name.endswith("_scale_inv"))
    out = Checkpoint(tmp_path / "out")
    assert torch.equal(out.read(NAME), dequantised(hf, NAME).bfloat16())
