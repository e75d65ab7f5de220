"""Snapshots of the state that outlive processes, and a fresh start from the nearest of them.

    <host memory or disk of a node, or remote store>/
        step-000060.generation-0002/
            layers.3.tp-0-of-2.rank-00001.safetensors   what rank 1 holds of layer 3
            ...
            rank-00001.5f3a09c2.json   the rank's files, each tensor's box and checksum, and what
                                       the step depends on; written last

A *tier* is where snapshots lie: in host memory (/dev/shm outlives a process, but not its node),
on the node's disk, in a remote store. In memory and on the disk a node keeps all that its ranks
hold, so that replicas on other nodes are copies; the remote store gets each element once. There is
no commit of all ranks: a step can be recovered when the manifests that are there cover every
element of the model (AutoHet, section IV-B). Manifests are believed by job, and steps of one
generation alone are put together: two may have come to a step by different roundings.

snapshots.py writes. sources.py knows which step is whole, assignment.py who reads what, fetch.py
reads and shares; recover.py is the whole way.
"""
