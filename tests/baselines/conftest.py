"""Models whose masks are right now and then: those of the decoding tests."""

from tests.decoding.conftest import drafter, gated_drafter, llama  # noqa: F401
