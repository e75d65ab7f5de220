"""A fake of the plugin torch_other."""

from fake_plugin import make

make("other")
