"""A fake of the plugin torch_mojo_backend: its device is written in Python.

Its tensors are a subclass of torch's without an address, around tensors of the host. As the real
one it makes its device when told to, and has no streams, timed events or account of memory.
"""

import types

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend


class PythonTensor(torch.Tensor):
    @staticmethod
    def around(host):
        made = torch.Tensor._make_wrapper_subclass(
            PythonTensor, host.shape, strides=host.stride(), dtype=host.dtype, device="mojo:0"
        )
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        asked = kwargs.get("device")
        if asked is not None:
            kwargs["device"] = "cpu"
        to_host = asked is not None and asked.type == "cpu"
        givens = {id(t.host): t for t in (*args, *kwargs.values()) if isinstance(t, cls)}
        to_host |= func is torch.ops.aten.copy_.default and not isinstance(args[0], cls)

        def leave(value):
            if isinstance(value, torch.Tensor) and not to_host:
                return givens[id(value)] if id(value) in givens else cls.around(value)
            return value

        inside = tree_map(lambda value: value.host if isinstance(value, cls) else value, args)
        named = tree_map(lambda value: value.host if isinstance(value, cls) else value, kwargs)
        result = func(*inside, **named)
        return args[0] if to_host and asked is None else tree_map(leave, result)


def empty(size, *, dtype=None, **_):
    return PythonTensor.around(torch.empty(size, dtype=dtype))


def empty_strided(size, stride, *, dtype=None, **_):
    return PythonTensor.around(torch.empty_strided(size, stride, dtype=dtype))


def register_mojo_devices():
    module = types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
    )
    torch.__future__.set_swap_module_params_on_conversion(True)
    _setup_privateuseone_for_python_backend("mojo", backend_module=module)
    torch.accelerator.synchronize = lambda device=None: None  # torch's asks C++
    torch.library.impl("aten::empty.memory_format", "privateuseone")(empty)
    torch.library.impl("aten::empty_strided", "privateuseone")(empty_strided)
