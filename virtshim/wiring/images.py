"""Settings -> how this node pulls images."""

from __future__ import annotations

from virtshim.config import Settings
from virtshim.images.filestore import ImageSettings


def image_settings(settings: Settings) -> ImageSettings:
    images = settings.images
    return ImageSettings(
        translations_dir=images.translations_dir,
        download_protocol=images.download_protocol,
        insecure_registries=images.insecure_registries,
        max_bytes=images.max_bytes,
        progress_timeout=images.progress_timeout,
    )
