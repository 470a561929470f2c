import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as python -m lab; before numpy is imported
