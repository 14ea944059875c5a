"""Writes `opencv.zip`, images with all options of OpenCV: `pip install opencv-python-headless`."""

import random
import sys
import zipfile
from pathlib import Path

import cv2
import numpy as np

SIZES = [(1, 1), (7, 9), (16, 17), (33, 65), (64, 40)]
SAMPLING = [0x411111, 0x221111, 0x211111, 0x121111, 0x111111]
FILTERS = [8, 16, 32, 64, 128, 248]


def picture(rng, height, width, channels, dtype):
    most = np.iinfo(dtype).max
    y, x = np.mgrid[:height, :width]
    base = (np.sin(x / 7) + np.cos(y / 5) + 2) / 4 * most
    image = np.stack([np.roll(base, 3 * channel, 1) for channel in range(channels)], -1)
    return (image + rng.normal(0, most / 40, image.shape)).clip(0, most).astype(dtype)


def jpeg(draw, rng):
    options = [cv2.IMWRITE_JPEG_QUALITY, draw.choice([1, 10, 50, 75, 95, 100])]
    options += [cv2.IMWRITE_JPEG_PROGRESSIVE, draw.randrange(2)]
    options += [cv2.IMWRITE_JPEG_OPTIMIZE, draw.randrange(2)]
    options += [cv2.IMWRITE_JPEG_RST_INTERVAL, draw.choice([0, 0, 1, 2, 7])]
    options += [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, draw.choice(SAMPLING)]
    if draw.random() < 0.4:
        options += [cv2.IMWRITE_JPEG_LUMA_QUALITY, 30, cv2.IMWRITE_JPEG_CHROMA_QUALITY, 80]
    image = picture(rng, *draw.choice(SIZES), draw.choice([1, 3, 3]), np.uint8)
    return ".jpg", image, options


def png(draw, rng):
    options = [cv2.IMWRITE_PNG_COMPRESSION, draw.choice([0, 1, 9])]
    options += [cv2.IMWRITE_PNG_STRATEGY, draw.randrange(5)]
    options += [cv2.IMWRITE_PNG_FILTER, draw.choice(FILTERS)] if draw.random() < 0.6 else []
    channels, dtype = draw.choice([1, 3, 4]), draw.choice([np.uint8, np.uint8, np.uint16])
    if channels == 1 and dtype == np.uint8 and draw.random() < 0.5:
        options += [cv2.IMWRITE_PNG_BILEVEL, 1]
    return ".png", picture(rng, *draw.choice(SIZES), channels, dtype), options


with zipfile.ZipFile(sys.argv[1], "w") as archive:
    for seed in range(120):
        kind = jpeg if seed % 2 else png
        extension, image, options = kind(random.Random(seed), np.random.default_rng(seed))
        written, data = cv2.imencode(extension, image, options)
        assert written
        archive.writestr(zipfile.ZipInfo(f"{seed:03}{extension}"), data.tobytes())
print(cv2.__version__, Path(sys.argv[1]).stat().st_size)
