"""A program over several devices, started as ``meshloom train`` is: alone, by torchrun, by srun, from a host file.

Usage: fabric_program.py FOLDER NODES [MODE]; nodes are ``node1=2,node2=2``, with ``!`` in front where they are names of hosts.
"""

import os
import sys
import time
from pathlib import Path

from meshloom.config.errors import UserError
from meshloom.fabric.launch import PlannedNode, attend_if_launched, open_site
from meshloom.fabric.workers import Workers


def main() -> int:
    code = attend_if_launched([sys.executable, *sys.argv])
    if code is not None:
        return code
    try:
        return control(Path(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else "sum")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def control(folder: Path, nodes: str, mode: str) -> int:
    parts = [text.partition("=") for text in nodes.lstrip("!").split(",")]
    planned = [PlannedNode(name, ("cpu",) * int(count)) for name, _, count in parts]
    if mode == "refused":
        raise UserError("a setting is wrong")
    site = open_site(planned, named=nodes.startswith("!"))
    with site, Workers("tests.fabric_hosts:Host", site=site, logs=folder, collectives=mode == "sum") as workers:
        (folder / "pids").write_text(" ".join(str(peer.hello["pid"]) for peer in workers.peers.values()))
        if mode == "sleep":
            call = workers.submit("sleep", phase="generate", deadline_s=600)
            next(call.events())
            (folder / "ready").write_text(str(os.getpid()))
            call.result()
        if mode == "sum":
            print("sums", workers.call("summed", {"value": 1.0}, phase="test", deadline_s=60))
        if mode == "fail":
            workers.call("fail", {"rank": 1, "user": False, "wait": False}, phase="update", deadline_s=60)
        for seat in workers.seats:
            print(f"seat {seat.rank} {seat.node} {seat.node_index} {seat.local_rank}")
    return 0


if __name__ == "__main__":
    began = time.monotonic()
    sys.exit(main())
