"""A pod's volumes as folders, and its mount paths rewritten to them."""

import base64
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pagefleet_localcluster.node.environment import ConfigProblem, PodFacts, field_of, resource_of
from pagefleet_localcluster.objects import Object


class VolumeProblem(Exception):
    """A volume cannot be set up (yet): said in a FailedMount event and tried again."""


def config_references(pod: Object) -> set[tuple[str, str]]:
    """("ConfigMap" | "Secret", name) of everything that the pod's environment and volumes read."""
    found: set[tuple[str, str]] = set()

    def note(kind: str, reference: Object | None, key: str = "name") -> None:
        if reference is not None and reference.get(key):
            found.add((kind, reference[key]))

    for container in [*(pod["spec"].get("initContainers") or ()), *pod["spec"]["containers"]]:
        for source in container.get("envFrom") or ():
            note("ConfigMap", source.get("configMapRef"))
            note("Secret", source.get("secretRef"))
        for entry in container.get("env") or ():
            note("ConfigMap", (entry.get("valueFrom") or {}).get("configMapKeyRef"))
            note("Secret", (entry.get("valueFrom") or {}).get("secretKeyRef"))
    for volume in pod["spec"].get("volumes") or ():
        for source in [volume, *((volume.get("projected") or {}).get("sources") or ())]:
            note("ConfigMap", source.get("configMap"))
            note("Secret", source.get("secret"), "name" if source is not volume else "secretName")
    return found


def decode_config(kind: str, obj: Object) -> dict[str, str]:
    """The data of a ConfigMap or Secret as text (bytes that are no UTF-8 are kept as surrogates)."""

    def decode(value: str) -> str:
        return base64.b64decode(value).decode(errors="surrogateescape")

    if kind == "Secret":
        return {key: decode(value) for key, value in (obj.get("data") or {}).items()}
    return {**(obj.get("data") or {}), **{key: decode(value) for key, value in (obj.get("binaryData") or {}).items()}}


def prepare_volumes(facts: PodFacts, folder: Path, shared: Path) -> dict[str, Path]:
    """Create the pod's volumes below `folder` and return volume name -> path. Raises VolumeProblem."""
    result: dict[str, Path] = {}
    for volume in facts.pod["spec"].get("volumes") or ():
        name = volume["name"]
        own = folder / name
        if (host := volume.get("hostPath")) is not None:
            result[name] = _host_path(name, host)
        elif (claim := volume.get("persistentVolumeClaim")) is not None:
            result[name] = shared / "claims" / facts.pod["metadata"]["namespace"] / claim["claimName"]
            result[name].mkdir(parents=True, exist_ok=True)
        elif "emptyDir" in volume or "ephemeral" in volume:
            own.mkdir(parents=True, exist_ok=True)
            result[name] = own
        else:
            own.mkdir(parents=True, exist_ok=True)
            _write_files(own, _files_of(volume, facts))
            result[name] = own
    return result


def mounts_of(
    container: Object, folders: Mapping[str, Path], variables: Callable[[str], str]
) -> list[tuple[str, Path]]:
    """(mount path, folder) of a container. `variables` expands `$(NAME)` in subPathExpr. Raises ConfigProblem."""
    mounts = []
    for mount in container.get("volumeMounts") or ():
        folder = folders.get(mount["name"])
        if folder is None:
            raise ConfigProblem(f"volume mount {mount['name']!r} of container {container['name']!r} has no volume")
        sub_path = mount.get("subPath") or (variables(mount["subPathExpr"]) if mount.get("subPathExpr") else "")
        if sub_path:
            target = folder / sub_path
            if not target.resolve().is_relative_to(folder.resolve()):
                raise ConfigProblem(f"subPath {sub_path!r} leaves its volume")
            if not target.exists():
                target.mkdir(parents=True)
            folder = target
        mounts.append((str(mount["mountPath"]).rstrip("/") or "/", folder))
    return mounts


def path_rewriter(mounts: Sequence[tuple[str, Path]]) -> Callable[[str], str]:
    """A function that replaces mount paths (whole path prefixes, longest first) inside any text by their folders."""
    real = {path: str(folder) for path, folder in mounts if path not in ("", "/") and path != str(folder)}
    if not real:
        return lambda text: text
    alternatives = "|".join(re.escape(path) for path in sorted(real, key=len, reverse=True))
    pattern = re.compile(rf"(?<![\w./-])({alternatives})(?![\w.-])")
    # file:///models/m and --model=/models/m are paths too; https://host/models is not.
    pattern_in_url = re.compile(rf"(?<=file://)({alternatives})(?![\w.-])")

    def rewrite(text: str) -> str:
        text = pattern_in_url.sub(lambda match: real[match.group(1)], text)
        return pattern.sub(lambda match: real[match.group(1)], text)

    return rewrite


def remove_volumes(folder: Path) -> None:
    """Delete a pod's own folder; what is mounted from elsewhere stays."""
    shutil.rmtree(folder, ignore_errors=True)


def _host_path(name: str, host: Object) -> Path:
    path, kind = Path(host["path"]), host.get("type") or ""
    if kind == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    elif kind == "FileOrCreate":
        path.touch()
    elif kind == "Directory" and not path.is_dir():
        raise VolumeProblem(
            f'MountVolume.SetUp failed for volume "{name}" : hostPath type check failed: {path} is not a directory'
        )
    elif kind == "File" and not path.is_file():
        raise VolumeProblem(
            f'MountVolume.SetUp failed for volume "{name}" : hostPath type check failed: {path} is not a file'
        )
    elif not path.exists():
        raise VolumeProblem(f'MountVolume.SetUp failed for volume "{name}" : {path} does not exist')
    return path


def _files_of(volume: Object, facts: PodFacts) -> dict[str, tuple[str, int]]:
    """relative path -> (text, mode) of a configMap, secret, downwardAPI or projected volume."""
    if (projected := volume.get("projected")) is not None:
        mode = projected.get("defaultMode", 0o644)
        files: dict[str, tuple[str, int]] = {}
        for source in projected.get("sources") or ():
            files |= _source_files(volume["name"], source, facts, mode)
        return files
    source = dict(volume)
    if "secret" in source:
        source["secret"] = {**source["secret"], "name": source["secret"]["secretName"]}
    options = source.get("configMap") or source.get("secret") or source.get("downwardAPI") or {}
    return _source_files(volume["name"], source, facts, options.get("defaultMode", 0o644))


def _source_files(volume_name: str, source: Object, facts: PodFacts, mode: int) -> dict[str, tuple[str, int]]:
    for kind, key in (("ConfigMap", "configMap"), ("Secret", "secret")):
        if (reference := source.get(key)) is None:
            continue
        data = facts.config.get((kind, reference["name"]))
        if data is None:
            if reference.get("optional"):
                return {}
            raise VolumeProblem(
                f'MountVolume.SetUp failed for volume "{volume_name}" : {kind.lower()} "{reference["name"]}" not found'
            )
        if not reference.get("items"):
            return {name: (text, mode) for name, text in data.items()}
        missing = [item["key"] for item in reference["items"] if item["key"] not in data]
        if missing and not reference.get("optional"):
            raise VolumeProblem(
                f'MountVolume.SetUp failed for volume "{volume_name}" : '
                f"references non-existent config key: {missing[0]}"
            )
        items = [item for item in reference["items"] if item["key"] in data]
        return {item["path"]: (data[item["key"]], item.get("mode", mode)) for item in items}
    if (downward := source.get("downwardAPI")) is not None:
        files = {}
        for item in downward.get("items") or ():
            if field := item.get("fieldRef"):
                text = field_of(field["fieldPath"], facts)
            else:
                text = resource_of(item["resourceFieldRef"], {"name": ""}, facts)
            files[item["path"]] = (text, item.get("mode", mode))
        return files
    kinds = sorted(set(source) - {"name"})
    raise VolumeProblem(f'volume "{volume_name}": {", ".join(kinds)} volumes do not exist on a process node')


def _write_files(folder: Path, files: Mapping[str, tuple[str, int]]) -> None:
    for name, (text, mode) in files.items():
        target = folder / name
        if not target.resolve().is_relative_to(folder.resolve()):
            raise VolumeProblem(f"file {name!r} leaves its volume")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode(errors="surrogateescape"))
        target.chmod(mode)
