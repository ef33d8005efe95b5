"""A process that decodes images, whose files may be made to take long.

Run as ``python -m ostinato.engine.prompts.image_worker MAX_PIXELS``. A question is a ``QUESTION``
and a file; the answer is an ``ANSWER`` and the pixels, or an error::

    MEASURE, number, file ─► OK, height, width            from the file's head
    DECODE,  number, file ─► OK, height, width, pixels    RGB
                          └► REFUSED, 0, 0, message
"""

import struct
import sys
from collections.abc import Iterable

from ostinato.core.errors import RequestError
from ostinato.engine.worker_process import Bytes, answer_questions
from ostinato.images.picture import decode, measure

CPU_LIMIT_S = 4.0
"""Processor time of one image. A PNG or JPEG of 33 million pixels takes 0.3 to 1.5 s."""

BYTES_PER_PIXEL, BASE_BYTES = 24, 2**28
"""Address space that the largest image may take, on top of the process's initial size."""

QUESTION = struct.Struct("<BI")
ANSWER = struct.Struct("<BII")
MEASURE, DECODE = range(2)
REFUSED, OK = range(2)


def main(max_pixels: int) -> None:
    """Decode images from standard input until its end."""

    def answer(question: bytearray) -> Iterable[Bytes]:
        kind, number = QUESTION.unpack_from(question)
        file, name = bytes(memoryview(question)[QUESTION.size :]), f"image {number}"
        try:
            if kind == MEASURE:
                width, height = measure(file, max_pixels, name)
                return [ANSWER.pack(OK, height, width)]
            picture = decode(file, max_pixels, name)
        except RequestError as error:
            return [ANSWER.pack(REFUSED, 0, 0), str(error).encode(errors="replace")]
        return [ANSWER.pack(OK, picture.height, picture.width), picture.pixels.data]

    answer_questions(answer, CPU_LIMIT_S, BASE_BYTES + BYTES_PER_PIXEL * max_pixels)


if __name__ == "__main__":
    main(int(sys.argv[1]))
