"""What a machine with a GPU is asked, in one command and less than eight minutes: `make gpu-check`.

    python -m benchmarks.gpu_check [--budget-s S] [--parts NAME ...] [--out FOLDER]

Parts run one after another, each in a process of its own, so that a kernel that faults or hangs
costs its part and no other. Each has a budget of seconds, writes JSON after every row, and says
what it left out; every measurement stands behind a check of the same code on the same machine.

- `parity`: kernels of 3D-DSA against the definition, in fp64 where that fits, else fp32;
- `engine`: the streaming engine's tests, on the device;
- `link`: copies from the store's kind of memory beside a bare loop of copies;
- `attention`: 3D-DSA, neighbourhood, dense and grid_sample: time, rate, memory;
- `adamw`: the optimizer on the CPU, and on the device with its state streamed there and back;
- `steps-1b`, `steps-4b`, `steps-largest`, `steps-largest8`: whole training steps; one trace.

`--device cpu --smoke` runs everything at toy sizes anywhere; the tests do that.
"""
