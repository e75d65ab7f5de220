"""Any decoder that transformers knows, by its own modules and its own forward.

A stage has the family's base model with its own layers in their places, and what hands activations
on unchanged in the places of the others; the family's own loop, masks and rotary angles run. Its
parameters are cut as the family's own tensor-parallel plan says.
"""
