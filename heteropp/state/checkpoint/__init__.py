"""Checkpoints: a folder a step, which appears whole or not at all, and which any plan can resume.

    checkpoints/step-000060/
        layers.3.rank-00001.safetensors   what rank 1 answers for of layer 3
        ...
        manifest.json                     step, model, settings, and of every file its size, its
                                          hash, and which boxes of which parameters it holds

Tensors are named as in the whole model and cut into boxes of it, so nothing in a file depends on
the plan that wrote it. torch.distributed.checkpoint reshards as well, but its files are one a rank,
its index is a pickle, and what a failed machine held cannot be told from its names: a file a block
and rank, with a manifest of boxes and holders, lets a machine fetch the layers it lacks, and no
others (AutoHet, section IV-B).
"""
