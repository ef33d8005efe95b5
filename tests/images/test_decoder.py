"""Images of clients are decoded in worker processes, within limits."""

import sys

import numpy as np
import pytest

from ostinato.core.errors import RequestError
from ostinato.engine.prompts.image_decoder import ImageDecoder
from ostinato.images.picture import as_picture
from tests.support.models.images import picture, png, repeated_scans


def test_a_worker_reads_what_the_process_itself_would_read():
    decoder, image = ImageDecoder(10**5), picture(1, 30, 20)
    file, known = png(image), as_picture(image, 10**5)
    assert decoder.measure(file, 1) == (known.width, known.height)
    decoded = decoder.decode(file, 1)
    assert np.array_equal(decoded.pixels, known.pixels) and decoded.digest == known.digest
    with pytest.raises(RequestError, match="image 7 cannot be decoded"):
        decoder.decode(file[:100], 7)
    with pytest.raises(RequestError, match="image 2 has 400 x 400 = 160000 pixels"):
        decoder.measure(png(picture(1, 400, 400)), 2)


def test_a_file_that_ends_its_worker_is_refused():
    decoder = ImageDecoder(10**7, (sys.executable, "-c", "import sys; sys.stdin.buffer.read(1)"))
    with pytest.raises(RequestError, match=r"image 1 takes more than .* to decode: send a simpler"):
        decoder.decode(png(picture(1)), 1)


@pytest.mark.nightly
def test_a_file_that_takes_too_long_is_refused_and_its_worker_replaced():
    """A file of a few hundred kilobytes whose 90 scans take seconds."""
    program = (
        "import sys; from ostinato.engine.prompts import image_worker as w; w.CPU_LIMIT_S = 0;"
        "w.main(int(sys.argv[1]))"
    )
    decoder = ImageDecoder(10**7, (sys.executable, "-c", program))
    bomb = repeated_scans(picture(1, 2000, 2000), 90)
    with pytest.raises(RequestError, match="image 1 takes more than"):
        decoder.decode(bomb, 1)
    assert decoder.decode(png(picture(1)), 2).pixels.any()
