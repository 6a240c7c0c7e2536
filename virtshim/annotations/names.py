"""Names of annotations. The controller and the agent write them into pods, and need no parser. Pure."""

from __future__ import annotations

from typing import Final

STATE_VOLUME_ANNOTATION: Final = "virtshim.io/state-volume"
RESTORE_FROM_ANNOTATION: Final = "virtshim.io/restore-from"
WARM_START_ANNOTATION: Final = "virtshim.io/warm-start"
# What a stop does with the memory of a VM that outlives the pod.
ON_STOP_ANNOTATION: Final = "virtshim.io/on-stop"
