"""Measure ours and the peers that are installed, by turns, in one run.

::

    python benchmarks/peers/run.py --peers-folder PEERS --out FOUND          # all, half an hour
    python benchmarks/peers/run.py --quick --out FOUND                       # does it work? seconds
    python benchmarks/peers/run.py --measures decode_16,batch_warm --engines ours,vllm --out FOUND
    python benchmarks/peers/run.py --variant torch:attention=torch --out FOUND

``benchmarks/peers/install.sh PEERS`` installs the peers. Table, plot and all samples go to the
folder of ``--out``; ``python -m benchmarks.peers.table FOUND/found.json`` brings the table into
``docs/benchmarks.md``, which says how measures and engines are set up.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from benchmarks.peers.command import main

    sys.exit(main(__doc__))
