"""Documents packed in one row, or batched, compute what each computes alone: outputs and gradients."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from glm5_next.plugins import dsa, kda
from glm5_next.plugins.documents import Documents
from glm5_next.plugins.dsa import SparseCoreAttention
from glm5_next.plugins.kernels import expand_pools, naive, sparse_attention
from glm5_next.plugins.packed_row import packed_row
from tests.support import tiny
from tests.support.faults import Fault, planted
from tests.support.parity import hf_gradients, logits_of, models, recorded, reference_run
from tests.support.tiny import VOCAB, Case, relative_error

CASE = Case(seed=1)
LENGTHS = (3, 64, 1, 65, 2, 63, 4)
MAX_ERROR = 1e-5
MAX_GRADIENT_ERROR = 1e-4
BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0, dtype=torch.int32)
IDS = tiny.tokens(sum(LENGTHS), seed=5)
DOCUMENTS = IDS.split(LENGTHS, dim=1)
TARGETS = torch.randint(0, VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(6))


@pytest.fixture(scope="module")
def model():
    return models(CASE)[1]


@pytest.fixture(scope="module")
def alone(model):
    """Logits of each document run by itself, one after another."""
    with torch.no_grad():
        return torch.cat([logits_of(model, document) for document in DOCUMENTS])


def gradients(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """By HF tensor: alone, the first site's alpha_pre has a gradient of zero (its streams are still copies, and the
    norm after the collapse undoes a common factor), which leaves nothing to compare."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    found = hf_gradients(model, CASE.config())
    model.zero_grad(set_to_none=True)
    return found


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="sum")


def assert_equal(got: Tensor, expected: Tensor, what: str, bound: float = MAX_ERROR) -> None:
    error = relative_error(got, expected)
    assert error <= bound, f"{what}: relative error {error:.1e}, bound {bound:.0e}"


def test_documents_in_one_row_have_the_logits_of_documents_run_alone(model, alone):
    with torch.no_grad():
        packed = logits_of(model, IDS, packed_row(BOUNDS))
    for length, got, expected in zip(LENGTHS, packed.split(LENGTHS), alone.split(LENGTHS)):
        assert_equal(got, expected, f"document of {length} tokens")


def test_documents_in_one_row_have_the_reference_logits_of_each(model):
    reference = models(CASE)[0]
    with torch.no_grad():
        packed = logits_of(model, IDS, packed_row(BOUNDS))
        for length, document, got in zip(LENGTHS, DOCUMENTS, packed.split(LENGTHS)):
            assert_equal(got, reference(input_ids=document).logits[0], f"document of {length} tokens")


def test_gradient_of_a_row_is_the_sum_of_its_documents_gradients(model):
    packed = gradients(model, loss_of(logits_of(model, IDS, packed_row(BOUNDS)), TARGETS))
    separate: dict[str, Tensor] = {}
    for document, targets in zip(DOCUMENTS, TARGETS.split(LENGTHS)):
        for name, gradient in gradients(model, loss_of(logits_of(model, document), targets)).items():
            separate[name] = separate.get(name, 0) + gradient
    assert packed.keys() == separate.keys() == reference_run(CASE, 77).gradients.keys()
    for name, gradient in packed.items():
        assert_equal(gradient, separate[name], f"gradient of {name}", MAX_GRADIENT_ERROR)


def test_documents_in_one_row_select_what_they_select_alone(model):
    def selected(ids, row=None):
        with torch.no_grad(), recorded(model) as record:
            logits_of(model, ids, row)
        return record.indices[3]

    packed = selected(IDS, packed_row(BOUNDS))
    for start, document, rows in zip(BOUNDS.tolist(), DOCUMENTS, packed.split(LENGTHS)):
        own = torch.where(rows >= 0, rows - start, -1)
        assert torch.equal(own.sort().values, selected(document).sort().values)


@pytest.mark.parametrize("lengths", [(70, 90), (5, 30)])
def test_second_document_does_not_move_when_the_first_is_poisoned(model, lengths):
    first, second = lengths
    ids = torch.cat([torch.arange(first) % 40 + 1, torch.arange(second) % 40 + 50])[None]  # no token in common
    row = torch.tensor([0, first, first + second], dtype=torch.int32)
    embedding = model.embedding.word_embeddings.weight
    kept = embedding.detach().clone()
    with torch.no_grad():
        before = logits_of(model, ids, packed_row(row))
        embedding[1:41] *= 1000
        after = logits_of(model, ids, packed_row(row))
        embedding.copy_(kept)
    assert relative_error(after[:first], before[:first]) > 0.1, "the poison does not reach the first document"
    assert_equal(after[first:], before[first:], "second document", 1e-6)


def test_first_document_has_no_gradient_from_a_loss_on_the_second(model):
    ids = torch.cat([torch.arange(70) % 40 + 1, torch.arange(90) % 40 + 50])[None]
    logits = logits_of(model, ids, packed_row(torch.tensor([0, 70, 160], dtype=torch.int32)))
    gradient = gradients(model, loss_of(logits[70:], TARGETS[:90]))["model.language_model.embed_tokens.weight"]
    assert gradient[50:90].any() and not gradient[1:41].any()


def test_batch_of_documents_has_the_logits_and_gradients_of_documents_run_alone(model):
    ids = tiny.tokens(2 * 37, seed=7).view(2, 37)
    targets = TARGETS[: 2 * 37].view(2, 37)
    batched = model(ids, torch.arange(37).expand(2, 37), None)
    separate = [logits_of(model, document[None]) for document in ids]
    assert_equal(batched, torch.stack(separate), "batch of two")
    together = gradients(model, loss_of(batched.flatten(0, 1), targets.flatten()))
    apart = gradients(model, sum(loss_of(logits, target) for logits, target in zip(separate, targets)))
    for name, gradient in together.items():
        assert_equal(gradient, apart[name], f"gradient of {name}", MAX_GRADIENT_ERROR)


def test_padding_after_each_document_changes_nothing_before_it(model, alone):
    padded = [-(-length // 8) * 8 for length in LENGTHS]
    ids = torch.cat(
        [F.pad(document, (0, size - document.shape[1]), value=9) for document, size in zip(DOCUMENTS, padded)], 1
    )
    padded_bounds = torch.tensor([0, *padded]).cumsum(0, dtype=torch.int32)
    row = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=BOUNDS,
        cu_seqlens_kv=BOUNDS,
        cu_seqlens_q_padded=padded_bounds,
        cu_seqlens_kv_padded=padded_bounds,
    )
    with torch.no_grad():
        logits = logits_of(model, ids, row)
    for length, got, expected in zip(LENGTHS, logits.split(padded), alone.split(LENGTHS)):
        assert_equal(got[:length], expected, f"document of {length} tokens")


def test_empty_documents_are_as_good_as_absent(model, alone):
    bounds = torch.cat([BOUNDS[:3], BOUNDS[2:3], BOUNDS[2:], BOUNDS[-1:]])
    with torch.no_grad():
        assert_equal(logits_of(model, IDS, packed_row(bounds)), alone, "row with empty documents")


def test_all_layers_use_one_description_of_the_row_and_leave_cu_seqlens_alone(model):
    bounds = BOUNDS.clone()
    with mock.patch.object(Documents, "from_cu_seqlens", wraps=Documents.from_cu_seqlens) as build:
        loss_of(logits_of(model, IDS, packed_row(bounds)), TARGETS).backward()
    model.zero_grad(set_to_none=True)
    assert build.call_count == 1
    assert bounds._version == 0 and torch.equal(bounds, BOUNDS)


@pytest.mark.parametrize(
    "bounds",
    [[1, 10], [0, 9], [0, 11], [0, 6, 4, 10], [0, 4, 12, 10]],
    ids=["starts_late", "ends_early", "ends_late", "falls", "overshoots"],
)
def test_bounds_that_do_not_cover_the_row_are_refused(model, bounds):
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to the row's 10 tokens"):
        logits_of(model, IDS[:, :10], packed_row(torch.tensor(bounds, dtype=torch.int32)))


def test_a_packed_row_is_one_row(model):
    ids = IDS[:, :10].expand(2, 10)
    with pytest.raises(ValueError, match="batch size 1, got 2"):
        model(ids, torch.arange(10).expand(2, 10), None, packed_seq_params=packed_row(torch.tensor([0, 10])))


def one_document(original):
    """The row as a single document, as a reader would see it who forgets cu_seqlens."""
    return lambda row, length, batch, device: Documents.of_equal_length(1, length * batch, device)


def without_history_limit(original):
    return lambda x, weight, documents: original(x, weight, Documents.of_equal_length(1, len(x), x.device))


def pools_of_the_whole_row(original):
    """Pools cut and scored along the row; only the attention itself stays inside the document."""

    def forward(self, q, latent, hidden_states, q_compressed, documents):
        row = Documents.of_equal_length(1, documents.num_tokens, documents.device)
        indices = expand_pools(self.indexer(hidden_states, q_compressed, row), row, self.kpool)
        indices = indices.masked_fill(indices < documents.starts.unsqueeze(1), -1)
        return sparse_attention(q, latent, indices, self.scale)

    return forward


LEAKS = {
    "kda_state_and_convolution_not_restarted": Fault(kda, "documents_of", one_document),
    "convolution_not_restarted": Fault(naive, "short_convolution", without_history_limit),
    "attention_not_restarted": Fault(dsa, "documents_of", one_document),
    "pools_not_restarted": Fault(SparseCoreAttention, "forward", pools_of_the_whole_row),
}


@pytest.mark.parametrize("name", LEAKS)
def test_leak_between_documents_shows(model, alone, name):
    with torch.no_grad(), planted(LEAKS[name]):
        packed = logits_of(model, IDS, packed_row(BOUNDS))
    error = relative_error(packed, alone)
    assert error > 50 * MAX_ERROR, f"{name}: logits differ by {error:.1e} only"
