"""A fake of the plugin torch_mlu."""

from fake_plugin import make

make("mlu")
