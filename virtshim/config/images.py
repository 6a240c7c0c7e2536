"""Settings of images: where they come from, and which are let in."""

from __future__ import annotations

import posixpath
from typing import Literal, Self

from pydantic import ByteSize, field_validator, model_validator

from virtshim.config.texts import NetworkText, PathText, Section, setting
from virtshim.model.errors import InvalidRequest
from virtshim.model.image_name import ImageName


def _prefix(text: str) -> str:
    """A prefix that nothing is ever below would be a rule that is not there."""
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
        raise ValueError(f"{text!r}: write {known}{slash}..., as origins are written")
    return text


class ImagePolicy(Section):
    """[[images.policy]]: what is asked of images by where they come from."""

    prefix: str = setting(
        "",
        "beginning of registry/repository, of a URL without its scheme, or of file:/path, in whole components; the longest that "
        "fits decides",
        allowed="text; empty: all images",
        reload=True,
        why="a rule without one is about what no other is about",
    )
    _origin = field_validator("prefix")(_prefix)
    require: Literal["nothing", "digest", "signature", "refuse"] = setting(
        "digest",
        "nothing; a digest in the image's name; a cosign signature by one of the keys; refuse: none is let in",
        reload=True,
        why="the least that says which bytes are meant",
    )
    keys: tuple[PathText, ...] = setting(
        (),
        "public keys, of which one must have signed",
        allowed="PEM files: ECDSA, RSA, Ed25519",
        reload=True,
        why="for signature alone",
    )

    @model_validator(mode="after")
    def _keys_and_signatures_go_together(self) -> Self:
        if (self.require == "signature") != bool(self.keys):
            raise ValueError('keys are given with require = "signature", and with nothing else; correct one of the two')
        return self


class ImageDiskPath(Section):
    """[[images.disk_paths]]: containerDisks whose disk is not below /disk."""

    prefix: str = setting(
        "", "as that of a policy", allowed="text; empty: all images", reload=True, why="one node, one way of packing"
    )
    _origin = field_validator("prefix")(_prefix)
    path: PathText = setting(
        "/disk",
        "of the disk in the image, or of the directory in which it is alone",
        reload=True,
        why="where KubeVirt has it",
    )

    @field_validator("path")
    @classmethod
    def _as_entries_are_named(cls, path: str) -> str:
        if posixpath.normpath(path) != path.rstrip("/") or not path.strip("/"):
            raise ValueError(f"{path!r} names nothing in an image; write it without empty components, . and ..")
        return path


class Images(Section):
    """[images]: pulls. A change by reload holds from the next pull on."""

    download_protocol: Literal["https", "http"] = setting(
        "https",
        "for image names that are URLs without scheme",
        reload=True,
        why="what arrives by http may be anybody's",
    )
    translations_dir: PathText = setting(
        "/etc/virtshim/images",
        "Virtlet image translation files",
        reload=True,
        why="beside the settings; the files are read at each pull",
    )
    registry_hosts_dir: PathText = setting(
        "/etc/containerd/certs.d",
        "registries' mirrors and certificates: hosts.toml as containerd reads them",
        reload=True,
        why="containerd's own: one set for containers and VMs, read at each pull",
    )
    insecure_registries: tuple[str, ...] = setting(
        (),
        "registries contacted without TLS; servers on loopback are asked for images only if they are here",
        allowed="`host[:port]` each; of loopback, all ports without one",
        reload=True,
        why="whoever is on the way could change the disk; daemons of the node trust who reaches them on loopback",
    )
    forbidden_networks: tuple[NetworkText, ...] = setting(
        (),
        "networks that images are not fetched from, beside loopback, link-local and metadata addresses",
        allowed="networks such as 10.0.0.0/8",
        reload=True,
        why="registries are often inside; list what pods' authors must not reach through the node",
    )
    max_bytes: ByteSize = setting(
        ByteSize(1 << 40),
        "largest disk, as published and as the guest sees it",
        unit="bytes",
        reload=True,
        why="1 TiB: larger ones are mistakes or attacks on the node's disk",
    )
    progress_timeout: float = setting(
        60.0,
        "time without a byte after which a pull is given up",
        unit="s",
        gt=0,
        reload=True,
        why="a registry that is busy sends something within it",
    )
    min_rate: ByteSize = setting(
        ByteSize(1 << 10),
        "what each connection brings a second, over images.progress_timeout of waiting for it; 0: a byte now and then",
        unit="bytes",
        reload=True,
        why="1 KiB: the slowest of links brings more, and who sends less means harm",
    )
    pull_timeout: float = setting(
        21600.0,
        "time that a pull may take in all, however its source trickles; 0: as long as it likes",
        unit="s",
        ge=0,
        reload=True,
        why="six hours: 20 GiB at a megabyte a second",
    )
    pulls: int = setting(
        24,
        "pulls under way at once; the last quarter is for namespaces that have none",
        unit="pulls",
        ge=1,
        le=1024,
        reload=True,
        why="each takes a processor, up to 512 MiB and a part of the free inodes, at worst",
    )
    namespace_pulls: int = setting(
        12,
        "pulls under way at once for the pods of one namespace",
        unit="pulls",
        ge=1,
        le=1024,
        reload=True,
        why="registries that trickle must not take the other namespaces' places",
    )
    parser_user: str = setting(
        "",
        "unprivileged user that reads images; default: virtshim-parser or nobody",
        allowed="name",
        reload=True,
        why="the package makes virtshim-parser, which owns nothing",
    )
    pinned: tuple[str, ...] = setting(
        (),
        "images that kubelet keeps when the disk fills up: listed as pinned",
        allowed="names as pods write them, or with a digest",
        reload=True,
        why="kubelet removes what no container uses; a prefetched image is such a one",
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
        "how full the images' file system may become before unused images that are not pinned are removed; 100: they stay",
        unit="%",
        ge=1,
        le=100,
        reload=True,
        why="kubelet removes them where it watches this file system; set it where `virtshim check` says that it does not",
    )
    gc_low_percent: int = setting(
        80,
        "how full it may still be afterwards",
        unit="%",
        ge=0,
        le=99,
        reload=True,
        why="kubelet's own default",
    )

    @model_validator(mode="after")
    def _low_is_below_high(self) -> Self:
        if self.gc_low_percent >= self.gc_high_percent:
            raise ValueError(
                f"gc_low_percent ({self.gc_low_percent}) is not below gc_high_percent ({self.gc_high_percent}); lower it"
            )
        return self

    policy: tuple[ImagePolicy, ...] = setting(
        (),
        "what images are asked for",
        allowed="tables",
        reload=True,
        why="none: every image that a pod may name is let in",
    )
    disk_paths: tuple[ImageDiskPath, ...] = setting(
        (),
        "where containerDisks have their disk, if not below /disk",
        allowed="tables",
        reload=True,
        why="most have it there",
    )
    file_dirs: tuple[PathText, ...] = setting(
        (),
        "directories whose files may be images (file:///DIR/NAME, or a translation that says so)",
        allowed="absolute paths",
        reload=True,
        why="no file of the node is a pod's to read",
    )
