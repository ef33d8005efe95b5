"""What every test shares: quiet machines, so that two workers do not fight over two cores."""

import os

# Before torch is imported by any test; OpenMP threads that outnumber cores spin and wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
