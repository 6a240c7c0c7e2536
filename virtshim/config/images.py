"""Settings of images: where they come from, and which are allowed."""

from __future__ import annotations

import posixpath
from typing import Literal, Self

from pydantic import ByteSize, field_validator, model_validator

from virtshim.config.texts import NetworkText, PathText, Section, setting
from virtshim.model.errors import InvalidRequest
from virtshim.model.image_name import ImageName


def _prefix(text: str) -> str:
    """Refuses a prefix that no image name can begin with, because the rule would silently never apply."""
    if "://" in text:
        raise ValueError(f"{text!r} has a scheme; write registry/repository, host/path or file:/path")
    host, slash, _ = text.partition("/")
    known = host.lower().removesuffix(":443").removesuffix(".")
    if (
        text
        and not text.startswith("file:/")
        and (host != known or known in ("index.docker.io", "registry-1.docker.io"))
    ):
        known = "docker.io" if known.endswith(".docker.io") else known
        raise ValueError(f"{text!r}: no image name begins so; write {known}{slash}...")
    return text


class ImagePolicy(Section):
    """[[images.policy]]: requirements for images, by their origin."""

    prefix: str = setting(
        "",
        "beginning of registry/repository, of a URL without its scheme, or of file:/path, in whole components; the longest "
        "matching prefix decides",
        allowed="text; empty: all images",
        reload=True,
        why="a rule without a prefix applies to all images that no other rule matches",
    )
    _origin = field_validator("prefix")(_prefix)
    require: Literal["nothing", "digest", "signature", "refuse"] = setting(
        "digest",
        "nothing; digest: the image's name must contain a digest; signature: one of the keys must have made a cosign signature; "
        "refuse: no image is allowed",
        reload=True,
        why="a digest is the weakest requirement that fixes the image's content",
    )
    keys: tuple[PathText, ...] = setting(
        (),
        "public keys; a signature by one of them is enough",
        allowed="PEM files: ECDSA, RSA, Ed25519",
        reload=True,
        why='only `require = "signature"` uses keys',
    )

    @model_validator(mode="after")
    def _keys_and_signatures_go_together(self) -> Self:
        if (self.require == "signature") != bool(self.keys):
            raise ValueError(
                'require = "signature" needs keys, and other values of require must not have keys; correct one of the two'
            )
        return self


class ImageDiskPath(Section):
    """[[images.disk_paths]]: where containerDisks keep their disk, if not below /disk."""

    prefix: str = setting(
        "",
        "beginning of image names, as in images.policy",
        allowed="text; empty: all images",
        reload=True,
        why="the images of one node are usually all packed in the same way",
    )
    _origin = field_validator("prefix")(_prefix)
    path: PathText = setting(
        "/disk",
        "path of the disk in the image, or of the directory that holds only the disk",
        reload=True,
        why="KubeVirt's path",
    )

    @field_validator("path")
    @classmethod
    def _as_entries_are_named(cls, path: str) -> str:
        if posixpath.normpath(path) != path.rstrip("/") or not path.strip("/"):
            raise ValueError(f"{path!r} cannot be a path in an image; write it without empty components, . and ..")
        return path


class Images(Section):
    """[images]: pulls and storage of images. A reload takes effect from the next pull on."""

    download_protocol: Literal["https", "http"] = setting(
        "https",
        "protocol for image names that are URLs without a scheme",
        reload=True,
        why="anybody on the network path can replace what http carries",
    )
    translations_dir: PathText = setting(
        "/etc/virtshim/images",
        "directory of Virtlet image translation files, to which the agent copies VirtletImageMapping objects",
        reload=True,
        why="beside the settings file; each pull reads the files again",
    )
    registry_hosts_dir: PathText = setting(
        "/etc/containerd/certs.d",
        "mirrors and certificates of registries: hosts.toml files as for containerd",
        reload=True,
        why="containerd's path, so that containers and VMs share one set; each pull reads the files again",
    )
    insecure_registries: tuple[str, ...] = setting(
        (),
        "registries contacted without TLS; a server on loopback is used only if it is listed here",
        allowed="`host[:port]` each; a loopback host without a port means all its ports",
        reload=True,
        why="without TLS, anybody on the network path could change the disk; and daemons on the node trust loopback clients",
    )
    forbidden_networks: tuple[NetworkText, ...] = setting(
        (),
        "networks that images are never fetched from, in addition to loopback, link-local and metadata addresses",
        allowed="networks such as 10.0.0.0/8",
        reload=True,
        why="registries are often in private networks; list the networks that pods' authors must not reach through the node",
    )
    max_bytes: ByteSize = setting(
        ByteSize(1 << 40),
        "largest disk, both as published and as the guest sees it",
        unit="bytes",
        reload=True,
        why="1 TiB: a larger disk is a mistake or an attack on the node's disk space",
    )
    progress_timeout: float = setting(
        60.0,
        "time without any data after which a pull fails",
        unit="s",
        gt=0,
        reload=True,
        why="even a busy registry sends some data within a minute",
    )
    min_rate: ByteSize = setting(
        ByteSize(1 << 10),
        "lowest data rate per second of each connection, averaged over images.progress_timeout; 0: any data at all is enough",
        unit="bytes",
        reload=True,
        why="1 KiB: even very slow links are faster, so a slower server is an attack",
    )
    pull_timeout: float = setting(
        21600.0,
        "longest time for a whole pull; 0: no limit",
        unit="s",
        ge=0,
        reload=True,
        why="six hours: enough for 20 GiB at one megabyte per second",
    )
    pulls: int = setting(
        24,
        "maximum number of concurrent pulls; the last quarter is reserved for namespaces that have no pull running",
        unit="pulls",
        ge=1,
        le=1024,
        reload=True,
        why="at worst, each pull takes a processor, 512 MiB of memory and a part of the free inodes",
    )
    namespace_pulls: int = setting(
        12,
        "maximum number of concurrent pulls for the pods of one namespace",
        unit="pulls",
        ge=1,
        le=1024,
        reload=True,
        why="one namespace's slow registries must not use up the pulls of other namespaces",
    )
    parser_user: str = setting(
        "",
        "unprivileged user that parses images; default: virtshim-parser or nobody",
        allowed="name",
        reload=True,
        why="the package creates virtshim-parser, which owns no files",
    )
    pinned: tuple[str, ...] = setting(
        (),
        "images that virtshim reports as pinned, so that kubelet keeps them when the disk fills up",
        allowed="image names as in pods, or with a digest",
        reload=True,
        why="kubelet removes images that no container uses, and so prefetched images that are not pinned",
    )

    @field_validator("pinned")
    @classmethod
    def _are_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            try:
                ImageName.parse(name)
            except InvalidRequest as exc:
                raise ValueError(str(exc)) from exc
        return names

    gc_high_percent: int = setting(
        100,
        "usage of the images' file system above which virtshim removes unused images that are not pinned; 100: never",
        unit="%",
        ge=1,
        le=100,
        reload=True,
        why="kubelet removes images only if it watches this file system; set this if `virtshim check` says that kubelet does not",
    )
    gc_low_percent: int = setting(
        80,
        "usage at which virtshim stops removing images",
        unit="%",
        ge=0,
        le=99,
        reload=True,
        why="kubelet's default",
    )

    @model_validator(mode="after")
    def _low_is_below_high(self) -> Self:
        if self.gc_low_percent >= self.gc_high_percent:
            raise ValueError(
                f"gc_low_percent ({self.gc_low_percent}) must be below gc_high_percent ({self.gc_high_percent}); lower it"
            )
        return self

    policy: tuple[ImagePolicy, ...] = setting(
        (),
        "requirements for images, by origin",
        allowed="tables",
        reload=True,
        why="no requirements: a pod may use any image",
    )
    disk_paths: tuple[ImageDiskPath, ...] = setting(
        (),
        "where containerDisks keep their disk, if not below /disk",
        allowed="tables",
        reload=True,
        why="most images keep it below /disk",
    )
    file_dirs: tuple[PathText, ...] = setting(
        (),
        "directories whose files pods may use as images (as file:///DIR/NAME, or through a translation)",
        allowed="absolute paths",
        reload=True,
        why="pods must not read the node's files",
    )
