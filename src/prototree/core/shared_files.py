"""What a run that is sent to others consists of, whichever way it goes: as one file, or through the model hub.

Files of other names are neither sent nor taken from what others send. None of these holds code. No torch here.
"""

import re

MAX_FILES = 20_000
_KNOWN = re.compile(
    r"packed\.json|config\.toml|metrics\.json|notes\.json|README\.md|rules\.txt|tree\.svg|tree\.png"
    r"|(trained|pruned|projected)/(tree\.json|weights\.safetensors)"
    r"|prototypes/(prototypes\.json|\d{1,6}(-photo)?\.webp)"
    r"|pages/((pages|spreads)\.json|[a-z0-9-]{1,40}\.webp)"
)


def is_shared(name: str) -> bool:
    """Whether a file of this name, within a run, goes along."""
    return _KNOWN.fullmatch(name) is not None
