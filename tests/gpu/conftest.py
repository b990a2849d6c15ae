"""Everything here needs a CUDA device and is skipped, with the reason, without one."""

import pytest
import torch


def has_gpu() -> bool:
    """Say whether there is a CUDA device, and not the CPU in the place of one."""
    return torch.cuda.is_available() and torch.accelerator.current_accelerator() is not None


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if not has_gpu():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device: run `make test-gpu`"))
