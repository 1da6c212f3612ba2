"""What these tests share with those of real processes."""

from tests.e2e.conftest import certificates

__all__ = ["certificates"]
