"""Memory of GPUs by card name, as nvidia-smi reports it. Pure: no I/O."""

import difflib
import re

MIB_OF_CARD = {
    "T4": 15360,
    "V100-16G": 16384,
    "V100-32G": 32768,
    "A10": 23028,
    "L4": 23034,
    "RTX 3090": 24576,
    "RTX 4090": 24564,
    "RTX 5090": 32607,
    "A100-40G": 40960,
    "L40S": 46068,
    "RTX A6000": 49140,
    "A100-80G": 81920,
    "H100": 81559,
    "H800": 81559,
    "H100 NVL": 95830,
    "H20": 97871,
    "GH200": 97871,
    "H200": 143771,
    "B200": 183359,
    "MI300X": 196592,
}


def gib_of(card: float | str) -> float | None:
    """GiB of a card by name, or a number as given (also as text). None for an unknown name or a number <= 0."""
    if isinstance(card, str):
        by_key = {key(name): mib for name, mib in MIB_OF_CARD.items()}
        if (mib := by_key.get(key(card))) is not None:
            return mib / 1024
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", card):
            return None
    return float(card) if float(card) > 0 else None


def key(name: str) -> str:
    """Canonical name: ignores case, spaces, dashes, vendor and the B of GB. "NVIDIA A100 80GB" is "A100-80G"."""
    plain = re.sub(r"nvidia|geforce|sxm\d?|hbm\d?e?|pcie|[^a-z0-9]", "", name.lower())
    return plain.replace("gb", "g").replace("h10080g", "h100")


def nearest(card: str) -> str:
    """Suggestion for an error text: similar names, or all names."""
    names = {key(name): name for name in MIB_OF_CARD}
    near = [one for one in names if key(card) and one.startswith(key(card))]
    found = [names[one] for one in near or difflib.get_close_matches(key(card), names, 2, 0.6)]
    return f"did you mean {' or '.join(found)}?" if found else f"cards are {', '.join(MIB_OF_CARD)}"
