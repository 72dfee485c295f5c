"""One process without a GPU: Triton kernels are interpreted. Triton decides that when it is imported, so it is said here."""

from tests.support import interpreter

interpreter.install()
