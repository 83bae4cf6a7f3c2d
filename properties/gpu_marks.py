"""What a test of GPUs needs."""

from __future__ import annotations

import pytest
import torch


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """Skipped, with the reason, on a machine with fewer."""
    return pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} GPUs")
