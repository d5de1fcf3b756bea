"""Images as bytes, bytes as forms."""

from __future__ import annotations

import io

from PIL import Image


def png(pixels, kind="PNG", **options) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format=kind, **options)
    return out.getvalue()


def as_form(files, name="picture.png"):
    return [("images", (name, data, "image/png")) for data in files]
