"""Letters of 5 x 7 dots, for a chart's labels. Pure. Called by `raster`.

Each letter is seven rows from the top, two hexadecimal digits a row, the leftmost dot being 10.
Small letters are drawn as capitals; what has no letter here is drawn as a box.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

WIDTH: Final = 5
HEIGHT: Final = 7

_ROWS: Final = {
    " ": "00000000000000",
    "0": "0E11131519110E",
    "1": "040C040404040E",
    "2": "0E11010204081F",
    "3": "1F02040201110E",
    "4": "02060A121F0202",
    "5": "1F101E0101110E",
    "6": "0608101E11110E",
    "7": "1F010204080808",
    "8": "0E11110E11110E",
    "9": "0E11110F01020C",
    "A": "0E11111F111111",
    "B": "1E11111E11111E",
    "C": "0E11101010110E",
    "D": "1C12111111121C",
    "E": "1F10101E10101F",
    "F": "1F10101E101010",
    "G": "0E11101711110F",
    "H": "1111111F111111",
    "I": "0E04040404040E",
    "J": "0702020202120C",
    "K": "11121418141211",
    "L": "1010101010101F",
    "M": "111B1515111111",
    "N": "11191513111111",
    "O": "0E11111111110E",
    "P": "1E11111E101010",
    "Q": "0E11111115120D",
    "R": "1E11111E141211",
    "S": "0F10100E01011E",
    "T": "1F040404040404",
    "U": "1111111111110E",
    "V": "11111111110A04",
    "W": "11111115151B11",
    "X": "11110A040A1111",
    "Y": "11110A04040404",
    "Z": "1F01020408101F",
    ".": "00000000000404",
    ",": "00000000040408",
    "-": "0000001F000000",
    "_": "0000000000001F",
    "/": "01010204081010",
    ":": "00040400040400",
    "(": "02040808080402",
    ")": "08040202020408",
    "%": "19190204081313",
}
_BOX: Final = "1F11111111111F"


def dots(text: str) -> npt.NDArray[np.bool_]:
    """The text as dots [HEIGHT, 6 x letters], a blank column after each letter."""
    found = np.zeros((HEIGHT, (WIDTH + 1) * len(text)), dtype=np.bool_)
    for place, letter in enumerate(text.upper()):
        rows = bytes.fromhex(_ROWS.get(letter, _BOX))
        for row, bits in enumerate(rows):
            for column in range(WIDTH):
                found[row, place * (WIDTH + 1) + column] = bool(bits >> (WIDTH - 1 - column) & 1)
    return found
