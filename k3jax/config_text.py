"""A configuration as the gin text that gives it back."""

import dataclasses

from k3jax.config import SECTIONS, Config


def config_to_gin(config: Config) -> str:
    """Every field as a gin binding, those that are not at their default marked with it.

    Args:
        config: any valid configuration.
    Returns:
        Text that `launch.configure.load_config` reads back to an equal configuration.
    """
    lines = ["# Every setting of a run. A comment on a line is the default that it departs from."]
    for section, cls in SECTIONS.items():
        lines.append("")
        part = getattr(config, section)
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            note = "" if value == field.default else f"  # default {field.default!r}"
            lines.append(f"{cls.__name__}.{field.name} = {value!r}{note}")
    return "\n".join(lines) + "\n"
