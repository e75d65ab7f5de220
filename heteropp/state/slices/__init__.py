"""What a rank holds of a run between two steps, for all that keep it, read it or move it.

quantities.py says what there is of every element, and what files have of it; holdings.py which
slices a rank holds by its plan; buffers.py in which tensors, of a running training or fresh ones;
state.py takes them from a training and gives them back, with the scalars that a step depends on
besides. block_files.py says how slices of a block are a file and hashes.py how damage is found.
Checkpoints, snapshots and switches stand on these.

A few things are there twice for a reason. Files have each value once, in full precision, from which
a parameter of 16 bits is cast; a switch moves the parameter as well, as every rank of a stage wants
all of it, and 16 bits are half of what the value has. checkpoint/reader.py reads files of a folder
that all ranks reach, and checks them whole; recovery/ reads ranges of bytes from whatever stores
are left, each once, and sends them on. A checkpoint has one manifest, as it counts when it is
whole; snapshots have one a rank, as they count for what is left of them.
"""
