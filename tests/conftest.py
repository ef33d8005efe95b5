"""What every test shares: threads that leave the cores to others while they wait."""

import os

# Before torch is imported by any test. By default OpenMP's threads spin while they wait, which on a
# busy machine keeps the very thread off its core that they wait for: ten times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
