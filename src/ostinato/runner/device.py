"""Resolves and checks a device name."""

import torch

from ostinato.core.errors import ConfigError


def resolve_device(name: torch.device | str) -> torch.device:
    """Return a device that can hold tensors.

    Args:
        name: As torch names it, such as ``"cpu"`` or ``"cuda:1"``.

    Raises:
        ConfigError: There is no such device here.

    Effects: allocates one number on it, which may start its driver.
    """
    if not isinstance(name, (str, torch.device)):
        raise ConfigError(_refusal(name, "must be the name of a device"))
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch raises all three
        raise ConfigError(_refusal(name, str(error).strip().splitlines()[0])) from error
    if device.type == "meta":
        raise ConfigError(_refusal(name, "it has shapes, but no data"))
    return device


def _refusal(name: object, reason: str) -> str:
    shown = str(name) if isinstance(name, torch.device) else name
    return f"device={shown!r}: {reason}; 'cpu' is always there"
