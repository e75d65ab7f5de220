"""A fake of the plugin torch_npu."""

from fake_plugin import make

make("npu")
