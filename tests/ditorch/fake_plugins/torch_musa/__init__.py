"""A fake of the plugin torch_musa."""

from fake_plugin import make

make("musa")
