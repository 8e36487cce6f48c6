"""A fair ablation: one field is adjusted until parameters or FLOPs are what they were. No jax import here."""

import dataclasses
import typing
from typing import Literal, NamedTuple

from k3jax.config import Config, ConfigError, ModelConfig
from k3jax.models.accounting import count_parameters, train_flops_per_token
from k3jax.train.figures import short

Quantity = Literal["parameters", "active", "flops"]
UNITS = {"parameters": "parameters", "active": "active parameters", "flops": "FLOPs a token"}
LARGEST = 2**40  # no field is tried beyond


class Hold(NamedTuple):
    """What is held at the value it has in the configuration without the sweep.

    Attributes:
        quantity: all parameters, those a token uses, or the FLOPs of training on a token.
        field: the integer field of ModelConfig that is adjusted, with its class; the quantity must grow with it.
        multiple: the adjusted value is a multiple of this.
        tolerance: how far off the quantity may stay, as a part of its value.
    """

    quantity: Quantity
    field: str
    multiple: int = 1
    tolerance: float = 0.02

    def check(self) -> None:
        """Raises ConfigError where the field is none that could be adjusted, or a number makes no sense."""
        cls, _, name = self.field.partition(".")
        hint = typing.get_type_hints(ModelConfig).get(name) if cls == "ModelConfig" else None
        if hint is not int and int not in typing.get_args(hint):
            raise ConfigError(f"--adjust={self.field}: give an integer field of ModelConfig, with its class")
        if self.multiple < 1:
            raise ConfigError(f"--multiple={self.multiple}: must be at least 1")
        if not 0 <= self.tolerance < 1:
            raise ConfigError(f"--tolerance={self.tolerance}: must lie in [0, 1)")


class Adjusted(NamedTuple):
    """A configuration with its field adjusted, and a line that says how, and how close it came."""

    config: Config
    line: str


def measure(config: Config, quantity: Quantity) -> float:
    """The quantity of one configuration."""
    if quantity == "flops":
        return train_flops_per_token(config.model, config.data.seq_len)
    table = count_parameters(config.model)
    return table.total if quantity == "parameters" else table.active


def adjust(config: Config, hold: Hold, target: float) -> Adjusted:
    """Sets the field to the value that brings the quantity nearest to the target.

    Args:
        config: a valid configuration.
        hold: what is held, and how.
        target: what the quantity should be.
    Returns:
        Adjusted.
    Raises:
        ConfigError: the quantity does not depend on the field, or no value of it comes within the tolerance.
    """
    name = hold.field.partition(".")[2]
    old, unit = getattr(config.model, name), UNITS[hold.quantity]
    if old is None:
        raise ConfigError(f"{hold.field} is None here, so it cannot be adjusted; bind it to a number")

    def value_of(units: int) -> float | None:
        try:
            return measure(_with(config, name, units * hold.multiple), hold.quantity)
        except ConfigError:
            return None

    start = max(1, round(old / hold.multiple))
    here, more = measure(config, hold.quantity), value_of(2 * start)
    if more == here and value_of(4 * start) == here:
        raise ConfigError(f"{unit} do not depend on {hold.field} here; --adjust another field")
    found = _nearest(value_of, start, target)
    if found is None:
        raise ConfigError(f"no multiple of {hold.multiple} is possible for {hold.field} here")
    new = found * hold.multiple
    reached = value_of(found)
    off = reached / target - 1
    numbers = f"{hold.field} = {new} gives {short(reached)} {unit}, {off:+.2%} of {short(target)}"
    if abs(off) > hold.tolerance:
        raise ConfigError(f"nothing comes nearer: {numbers}; --adjust another field, or allow a higher --tolerance")
    change = f"{old} -> {new}" if new != old else f"{old} as it was"
    return Adjusted(_with(config, name, new), f"{name} {change}: {short(reached)} {unit} ({off:+.2%})")


def _nearest(value_of: typing.Callable[[int], float | None], start: int, target: float) -> int | None:
    """The possible whole number whose value is nearest to the target, by bisection; impossible ones bound it."""
    low, high = 0, start  # value_of(low) < target, or impossible; value_of(high) >= target, or impossible
    while (value := value_of(high)) is not None and value < target and high < LARGEST:
        low, high = high, 2 * high
    # Too small to be possible and too large to be possible look alike; only the first has possible numbers above.
    while high - low > 1:
        middle = (low + high) // 2
        value = value_of(middle)
        below = value < target if value is not None else middle < start
        low, high = (middle, high) if below else (low, middle)
    near = [(abs(value - target), n) for n in (low, high) if n > 0 and (value := value_of(n)) is not None]
    return min(near)[1] if near else None


def _with(config: Config, name: str, value: int) -> Config:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **{name: value}))
