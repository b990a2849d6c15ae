"""What a training run costs before it is started: work, memory, communication, layouts, days.

`lengths` and `samples` say how documents fill samples, `work` counts operations, `memory` bytes on
a GPU, `communication` bytes between them, `step_time` turns these into seconds under stated
assumptions, `layouts` refuses what cannot run, `plan` ranks the rest, `launch` writes the command.
Everything is arithmetic on numbers: numpy, no torch, no GPU, nothing of Megatron is imported.
"""
