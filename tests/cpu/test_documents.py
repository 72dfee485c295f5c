"""What kernels are told about the documents of a row."""

import pytest
import torch

from glm5_next.plugins.documents import Documents


def row_of(*lengths: int) -> Documents:
    return Documents.from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32), sum(lengths))


def test_boundaries_that_were_edited_in_place_are_refused():
    documents = row_of(3, 5)
    assert documents.unchanged_cu_seqlens() is documents.cu_seqlens
    documents.cu_seqlens[1] = 4
    with pytest.raises(RuntimeError, match="cu_seqlens was edited in place"):
        documents.unchanged_cu_seqlens()


def test_host_copy_is_the_same_object_every_time():
    documents = row_of(3, 5)
    assert documents.cu_seqlens_cpu is documents.cu_seqlens_cpu
    assert documents.cu_seqlens_cpu.tolist() == documents.cu_seqlens.tolist() == [0, 3, 8]


def test_groups_are_the_row_in_parts():
    documents = row_of(3, 5, 1, 2, 7)
    groups = documents.groups(2)
    assert [group.lengths for group in groups] == [(3, 5), (1, 2), (7,)]
    assert [group.cu_seqlens.tolist() for group in groups] == [[0, 3, 8], [0, 1, 3], [0, 7]]
    assert documents.groups(2) is groups and documents.groups(5) == [documents]


def test_pool_range_covers_the_documents_of_the_tokens_and_no_others():
    documents = row_of(9, 3, 8, 4)  # 2, 0, 2 and 1 pools
    expected = {
        (0, 1): (0, 2),
        (0, 9): (0, 2),
        (8, 10): (0, 2),
        (9, 12): (2, 2),
        (11, 13): (2, 4),
        (12, 24): (2, 5),
        (23, 24): (4, 5),
    }
    assert {tokens: documents.pool_range(*tokens, 4) for tokens in expected} == expected
