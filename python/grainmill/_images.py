"""Transforms that decode images; `transforms` has their public names."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from grainmill._native import ImageDecoder, copy_rows
from grainmill._plan.spec import ShapeDtypeStruct
from grainmill._plan.transforms import Map, OfEngine, RandomMap

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Box: TypeAlias = tuple[int, int, int, int]
Filter: TypeAlias = Literal["bilinear", "bicubic", "lanczos", "box"]
_FILTERS = ("bilinear", "bicubic", "lanczos", "box")
_CROPS = ("center", "fit")
# What PIL refuses, too.
MAX_PIXELS = 178_956_970


class _Options(NamedTuple):
    """How images are decoded; see `DecodeImage`."""

    channels: Literal[1, 3, 4] | None
    resample: Filter
    draft: bool
    exif_orientation: bool
    max_pixels: int
    allow_damaged: bool

    def check(self) -> None:
        """Raises a `ValueError` if one is invalid."""
        if self.channels not in {None, 1, 3, 4}:
            raise ValueError(f"`channels` must be 1, 3, 4 or None, got {self.channels!r}")
        if self.resample not in _FILTERS:
            known = ", ".join(_FILTERS)
            raise ValueError(f"`resample` must be one of {known}, got {self.resample!r}")
        if self.max_pixels < 1:
            raise ValueError(f"`max_pixels` must be at least 1, got {self.max_pixels}")


class _Decoder(OfEngine):
    """What both transforms have in common: options, and where an element's bytes are."""

    _engine: ImageDecoder

    def __init__(
        self, feature: str | None, size: tuple[int, int] | None, options: _Options
    ) -> None:
        options.check()
        if size is not None:
            try:
                height, width = size
            except (TypeError, ValueError) as error:
                raise type(error)(
                    f"`size` must be a height and a width, as (224, 224), got {size!r}"
                ) from None
            if min(height, width) < 1:
                raise ValueError(f"`size` must be a height and a width of at least 1, got {size}")
        self._feature = feature
        self._size = size
        self._options = options
        self._engine = self._new_engine()

    @property
    def _ignores_input_spec(self) -> bool:
        return self._feature is None

    def output_spec(self, input_spec: Any) -> Any:
        """Returns the shape and dtype of the array, or the dict with them; `None` if one varies.

        Args:
            input_spec: Those of the elements; any object if they are bytes.
        """
        height, width = self._size or (None, None)
        pixels = ShapeDtypeStruct((height, width, self._options.channels), np.dtype(np.uint8))
        return pixels if self._feature is None else {**input_spec, self._feature: pixels}

    def _new_engine(self) -> ImageDecoder:
        return ImageDecoder(**self._options._asdict())

    def __repr__(self) -> str:
        own = {"feature": self._feature, "size": self._size, **self._shown()}
        shown = own | self._options._asdict()
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in shown.items())})"

    def _shown(self) -> dict[str, Any]:
        return {}

    def _image_of(self, element: Any) -> bytes:
        image = element if self._feature is None else element[self._feature]
        if isinstance(image, bytes):
            return image
        if isinstance(image, bytearray | memoryview) or getattr(image, "dtype", None) == "uint8":
            return bytes(image)
        where = "an element" if self._feature is None else f"the feature {self._feature!r}"
        raise TypeError(f"{where} must be the bytes of an image, got {type(image).__name__}")

    def _with_pixels(self, element: Any, pixels: np.ndarray) -> Any:
        return pixels if self._feature is None else {**element, self._feature: pixels}


class DecodeImage(_Decoder, Map):
    """Decodes JPEG, PNG, WebP and GIF images to uint8 arrays of shape [height, width, channels].

    Give it to `ds.map`, `ds.apply` or `DataLoader`. It runs without the interpreter lock, so
    threads decode in parallel, and computes only the pixels that it returns: what lies outside of a
    crop is read, since it must be, but of JPEG and PNG not decoded. Pixels are those of PIL (which
    uses libjpeg-turbo and libwebp), byte by byte, except that `channels=1` takes a JPEG's own
    brightness, as PIL's `draft` and TensorFlow do. See `DecodeRandomCrop` for random crops.

    Args:
        feature: Where elements are dicts, the key of the bytes, which the array replaces. None:
            elements are bytes.
        size: Height and width of the result. None: those of the crop.
        crop: What to decode. None: the whole image, resized to `size`. "center": a window of
            `size` in the middle of the image, with its own pixels; where the image is smaller
            than that, as "fit". "fit": the largest window in the middle that has the shape of
            `size`, resized to it, as PIL's `ImageOps.fit` but with whole pixels. A function of
            the image's height and width: the rectangle (top, left, height, width) that it
            returns, resized to `size`.
        channels: 1 for gray, 3 for red, green and blue, 4 with alpha. None: as stored; a
            palette counts as what it contains, and CMYK as 3.
        resample: How to resize: "bilinear", "bicubic", "lanczos" or "box", as PIL does, which
            takes all pixels into account when it makes an image smaller.
        fraction: With "fit", the share of the window's sides that is left, above 0 and at most
            1: 0.875 is often used for evaluation.
        draft: Whether to decode a JPEG at a half, a quarter or an eighth of its size where that
            is not smaller than `size`, as PIL's `draft` does. That takes a third less time for
            large images; pixels differ a little from those of a resized whole image.
        exif_orientation: Whether to turn the image upright as EXIF says, or XMP where EXIF says
            nothing, like PIL's `exif_transpose`. `crop` and `size` are those of the upright image.
        max_pixels: Larger images are errors, before memory is allocated for them.
        allow_damaged: Whether the rest of an image that was cut short or damaged is gray (JPEG),
            black (PNG) or of its first colour (GIF), instead of an error; of WebP, all is black.

    Raises:
        ValueError: An argument is invalid, or `crop` or `fraction` does not go with the others.
            When an image is decoded: it has too many pixels, or the rectangle that `crop`
            returned does not lie in it.
        GrainmillError: When an image is decoded: it is damaged, or of another format.

    Example:
        >>> decode = grain.transforms.DecodeImage("image", size=(224, 224), crop="center")
        >>> ds = grain.MapDataset.source([{"image": jpeg, "label": 3}]).map(decode)
        >>> ds[0]["image"].shape, ds[0]["label"]
        ((224, 224, 3), 3)
    """

    def __init__(
        self,
        feature: str | None = None,
        *,
        size: tuple[int, int] | None = None,
        crop: Literal["center", "fit"] | Callable[[int, int], Box] | None = None,
        channels: Literal[1, 3, 4] | None = 3,
        resample: Filter = "bilinear",
        fraction: float = 1.0,
        draft: bool = False,
        exif_orientation: bool = False,
        max_pixels: int = MAX_PIXELS,
        allow_damaged: bool = False,
    ) -> None:
        if isinstance(crop, str) and crop not in _CROPS:
            raise ValueError(
                f'`crop` must be "center", "fit", a function or None, got {crop!r}; '
                "`DecodeRandomCrop` has random crops"
            )
        if isinstance(crop, str) and size is None:
            raise ValueError(f"`crop={crop!r}` needs a `size`")
        if not 0 < fraction <= 1:
            raise ValueError(f"`fraction` must be above 0 and at most 1, got {fraction}")
        if fraction != 1 and crop != "fit":
            raise ValueError('`fraction` needs `crop="fit"`')
        options = _Options(channels, resample, draft, exif_orientation, max_pixels, allow_damaged)
        super().__init__(feature, size, options)
        self._crop = crop
        self._fraction = fraction

    def map(self, element: Any) -> Any:
        """Returns the decoded element.

        Args:
            element: The bytes of an image, or a dict that contains them.
        """
        image = self._image_of(element)
        pixels = self._engine.decode(image, self._crop_of(image), self._size)
        return self._with_pixels(element, pixels)

    def map_block(self, elements: list[Any]) -> list[Any]:
        """Returns each decoded element; all are decoded in one call without the interpreter lock.

        Args:
            elements: The bytes of images, or dicts that contain them.
        """
        images = [self._image_of(element) for element in elements]
        pixels = self._engine.decode_block(images, self._crops_of(images), self._size)
        return [self._with_pixels(*pair) for pair in zip(elements, pixels, strict=True)]

    # So blocks are not made longer to see whether that helps.
    _costs_by_element = True

    def _fill_rows(self, elements: list[Any], columns: Sequence[tuple[Any, Any]], at: int) -> bool:
        """Writes the results to the rows of a batch; see `RowWriter`."""
        targets = dict(columns)
        rows = targets.pop(self._feature, None)
        if not isinstance(rows, np.ndarray):
            return False
        if self._feature is not None and {len(element) for element in elements} != {len(columns)}:
            return False
        lists = []
        for key, target in targets.items():
            values = [element[key] for element in elements]
            if type(target) is list:
                lists.append((target, values))
            elif copy_rows(target, values, at, hot=True) < len(values):
                return False
        images = [self._image_of(element) for element in elements]
        if not self._engine.fill(images, self._crops_of(images), self._size, rows, at):
            return False
        for target, values in lists:
            target.extend(values)
        return True

    def _crops_of(self, images: list[bytes]) -> list[Box | None]:
        return (
            [None] * len(images)
            if self._crop is None
            else [self._crop_of(image) for image in images]
        )

    def _crop_of(self, image: bytes) -> Box | None:
        return None if self._crop is None else self._box(*self._engine.size(image))

    def _box(self, height: int, width: int) -> Box:
        if callable(self._crop):
            return self._crop(height, width)
        to_height, to_width = self._size or (height, width)
        if self._crop == "center" and to_height <= height and to_width <= width:
            return _centered(height, width, to_height, to_width)
        # Compared as products, so that whole pixels are exact.
        if height * to_width <= width * to_height:
            shape = (height, max(1, round(height * to_width / to_height)))
        else:
            shape = (max(1, round(width * to_height / to_width)), width)
        return _centered(height, width, *(max(1, round(n * self._fraction)) for n in shape))

    def _shown(self) -> dict[str, Any]:
        return {"crop": self._crop, "fraction": self._fraction}


class DecodeRandomCrop(_Decoder, RandomMap):
    """Decodes a random rectangle of images, resized to one size.

    The crop is that of the Inception papers, as torchvision's `RandomResizedCrop` draws it: an area
    and a ratio of sides, up to ten times until they fit. Give it to `ds.random_map`, `ds.apply` or
    `DataLoader`: the generator of each record decides, so a record's crop depends on the seed and
    its position only, not on threads or workers, and a restored pipeline goes on with the same
    ones. Everything else is as for `DecodeImage`.

    Args:
        feature: As for `DecodeImage`.
        size: Height and width of the result.
        scale: Lower and upper bound of the crop's area, as a share of the image's.
        ratio: Lower and upper bound of the crop's width divided by its height.
        channels: As for `DecodeImage`.
        resample: As for `DecodeImage`.
        draft: As for `DecodeImage`.
        exif_orientation: As for `DecodeImage`.
        max_pixels: As for `DecodeImage`.
        allow_damaged: As for `DecodeImage`.

    Raises:
        ValueError: An argument is invalid. When an image is decoded: it has too many pixels.
        GrainmillError: When an image is decoded: it is damaged, or of another format.

    Example:
        >>> decode = grain.transforms.DecodeRandomCrop(size=(64, 64))
        >>> ds = grain.MapDataset.source([jpeg]).repeat().random_map(decode, seed=0)
        >>> ds[0].shape, (ds[0] == ds[1]).all()
        ((64, 64, 3), np.False_)
    """

    def __init__(
        self,
        feature: str | None = None,
        *,
        size: tuple[int, int],
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        channels: Literal[1, 3, 4] | None = 3,
        resample: Filter = "bilinear",
        draft: bool = False,
        exif_orientation: bool = False,
        max_pixels: int = MAX_PIXELS,
        allow_damaged: bool = False,
    ) -> None:
        if not 0 < scale[0] <= scale[1] <= 1:
            raise ValueError(f"`scale` must be two growing shares above 0 up to 1, got {scale}")
        if not 0 < ratio[0] <= ratio[1] < math.inf:
            raise ValueError(f"`ratio` must be two growing numbers above 0, got {ratio}")
        options = _Options(channels, resample, draft, exif_orientation, max_pixels, allow_damaged)
        super().__init__(feature, size, options)
        self._scale = scale
        self._ratio = ratio

    def random_map(self, element: Any, rng: np.random.Generator) -> Any:
        """Returns the decoded element.

        Args:
            element: The bytes of an image, or a dict that contains them.
            rng: The random generator of this element.
        """
        image = self._image_of(element)
        box = self._random_box(*self._engine.size(image), rng)
        return self._with_pixels(element, self._engine.decode(image, box, self._size))

    def _random_box(self, height: int, width: int, rng: np.random.Generator) -> Box:
        low, high = math.log(self._ratio[0]), math.log(self._ratio[1])
        for _ in range(10):
            area = height * width * rng.uniform(*self._scale)
            ratio = math.exp(rng.uniform(low, high))
            crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < crop_width <= width and 0 < crop_height <= height:
                top = int(rng.integers(height - crop_height + 1))
                left = int(rng.integers(width - crop_width + 1))
                return top, left, crop_height, crop_width
        # The largest window in the middle whose ratio is allowed.
        crop_height, crop_width = height, width
        if width < height * self._ratio[0]:
            crop_height = max(1, min(height, round(width / self._ratio[0])))
        elif width > height * self._ratio[1]:
            crop_width = max(1, min(width, round(height * self._ratio[1])))
        return _centered(height, width, crop_height, crop_width)

    def _shown(self) -> dict[str, Any]:
        return {"scale": self._scale, "ratio": self._ratio}


def _centered(height: int, width: int, crop_height: int, crop_width: int) -> Box:
    """The rectangle of that shape in the middle of an image."""
    return (height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width
