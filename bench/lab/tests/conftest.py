import os
import pathlib

# Before numpy is imported. As python -m lab:
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# The same kernels everywhere: OpenBLAS has others for AVX-512, whose roundings move single codes of the model.
cpu = pathlib.Path("/proc/cpuinfo")
if cpu.exists() and " avx2 " in cpu.read_text():
    os.environ.setdefault("OPENBLAS_CORETYPE", "Haswell")
