"""Hot loops: per kernel a plain torch reference, C++ for CPUs, Triton for GPUs, and a chooser that says why."""
