"""A model's state by name, read without walking the network, and copied as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

Place = tuple[Mapping[str, Tensor | None], str, Tensor, int]
"""Where a module holds a tensor: the mapping, the name in it, the tensor, and the address of its memory."""


class ModelState:
    """The state of a model that a device keeps for many exchanges.

    ``state_dict`` and ``load_state_dict`` walk every module each time. With small networks that takes as long as a
    training step. The walk is made once, and again when the network has put another tensor in a tensor's place. A
    network whose modules change their own state dict (hooks, functions of their own) is walked each time.

    Args:
        model: the model, on the device.
        shared: the names that are exchanged.
    """

    def __init__(self, model: nn.Module, shared: set[str]) -> None:
        self.model, self.shared = model, frozenset(shared)
        self._plain = False
        self._tensors: dict[str, Tensor] = {}
        self._unsaved: dict[str, Tensor] = {}
        self._places: list[Place] = []
        self._kinds: dict[str, list[str]] = {}
        self._modules: list[tuple[nn.Module, tuple[nn.Module | None, ...], int, int]] = []
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._modes: list[bool] = []
        self._trainable: list[bool] = []
        self._fixed = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        self._read()
        self.initial = self.copy()
        self._initial_unsaved = {name: buffer.clone() for name, buffer in self._unsaved.items()}

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the model's tensors by name, detached, in the order of its ``state_dict``; they are not copied."""
        known = self._plain
        for module, children, parameters, buffers in self._modules:
            known = known and tuple(module._modules.values()) == children
            known = known and len(module._parameters) == parameters and len(module._buffers) == buffers
        for holder, name, tensor, address in self._places:
            known = known and holder.get(name) is tensor and tensor.data_ptr() == address
        if not known:
            self._read()
        return self._tensors

    def reset(self) -> list[tuple[str, nn.Parameter]]:
        """Set training mode, remove the gradients, and :meth:`unfreeze`. What was built in evaluation mode stays in it.

        The model's own ``train`` and ``requires_grad_``, which walk every module, are called where something is not as
        they left it.

        Returns:
            The parameters with their names, as ``named_parameters`` has them.
        """
        self.tensors()
        if [module.training for module, *_ in self._modules] != self._modes:
            self.model.train()
            self._modes = [module.training for module, *_ in self._modules]
        for _, parameter in self._parameters:
            parameter.grad = None
        if [parameter.requires_grad for _, parameter in self._parameters] != self._trainable:
            self.unfreeze()
            self._trainable = [parameter.requires_grad for _, parameter in self._parameters]
        return self._parameters

    def unfreeze(self) -> None:
        """Let every parameter have a gradient, but for those that had none when the model had been built."""
        self.model.requires_grad_(True)
        for parameter in self._fixed:
            parameter.requires_grad_(False)

    @torch.no_grad()
    def copy(self) -> dict[str, Tensor]:
        """Return a copy of the model's tensors by name."""
        tensors = self.tensors()
        copies = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        for names in self._kinds.values():  # one call for a kind of tensor, which a GPU copies at once
            torch._foreach_copy_([copies[name] for name in names], [tensors[name] for name in names])
        return copies

    @torch.no_grad()
    def install(self, values: Mapping[str, Tensor]) -> None:
        """Copy ``values`` into the model.

        Buffers that are not in the state get their first values again, so that no client finds another's.

        Args:
            values: a tensor for each name of the state.

        Raises:
            RuntimeError: names or shapes are not those of the model.
        """
        tensors = self.tensors()
        for name, buffer in self._unsaved.items():
            first = self._initial_unsaved.get(name)
            if first is not None and first.shape == buffer.shape:
                buffer.copy_(first)
        fits = self._plain and tensors.keys() == values.keys()
        if not fits or any(tensor.shape != values[name].shape for name, tensor in tensors.items()):
            self.model.load_state_dict(values)
            return
        for names in self._kinds.values():
            torch._foreach_copy_([tensors[name] for name in names], [values[name] for name in names])

    def _read(self) -> None:
        self._plain = all(_is_plain(module) for module in self.model.modules())
        self._tensors = dict(self.model.state_dict())
        self._unsaved = {name: buffer for name, buffer in self.model.named_buffers() if name not in self._tensors}
        self._places = list(_places(self.model))
        self._modules = []
        for module in self.model.modules():
            children = tuple(module._modules.values())
            self._modules.append((module, children, len(module._parameters), len(module._buffers)))
        self._parameters = list(self.model.named_parameters())
        self._modes, self._trainable = [], []
        self._kinds = {}
        for name, tensor in self._tensors.items():
            self._kinds.setdefault(str(tensor.dtype), []).append(name)


def _is_plain(module: nn.Module) -> bool:
    """Return whether the state of a module is its own parameters and buffers, and no code of its own changes them."""
    hooks = (
        module._state_dict_hooks,
        module._state_dict_pre_hooks,
        module._load_state_dict_pre_hooks,
        module._load_state_dict_post_hooks,
    )
    if any(hooks):
        return False
    kind = type(module)
    functions = (
        kind.state_dict,
        kind.load_state_dict,
        kind._save_to_state_dict,
        kind._load_from_state_dict,
        kind.get_extra_state,
    )
    return all(function.__module__.startswith("torch.nn.") for function in functions)


def _places(model: nn.Module) -> Iterator[Place]:
    for module in model.modules():
        for holder in (module._parameters, module._buffers):
            for name, tensor in holder.items():
                if tensor is not None:
                    yield holder, name, tensor, tensor.data_ptr()
