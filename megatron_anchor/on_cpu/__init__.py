"""Run Megatron programs on a machine without a GPU.

`python -m megatron_anchor.on_cpu script.py ...` runs a program with CUDA calls meaning the CPU and
NCCL meaning gloo; `enable()` does the same from Python. Importing this package changes nothing.

What runs this way shows that a program's logic holds. It shows nothing about kernels, NCCL, memory
or speed.
"""

from typing import Any

_installers: list[Any] = []


def enable(*, force: bool = False) -> None:
    """Replace CUDA by the CPU in this process; `--list` of the module shows what that means.

    Rows of modules that are imported later are installed after their import. Calling it again
    changes nothing; there is no way back within a process.

    Args:
        force: also where CUDA works.

    Raises:
        RuntimeError: CUDA works here, and `force` is not given.
    """
    if _installers:
        return
    import torch

    if torch.cuda.is_available() and not force:
        raise RuntimeError(
            f"CUDA works on this machine ({torch.cuda.device_count()} devices): run the program "
            "itself, or give --force (enable(force=True)) to run it on the CPU all the same"
        )

    from megatron_anchor.on_cpu.installer import Installer
    from megatron_anchor.on_cpu.rows import ROWS
    from megatron_anchor.on_cpu.settings import SETTINGS

    for setting in SETTINGS:
        setting.apply()
    _installers.append(Installer())
    _installers[0].install(ROWS)
