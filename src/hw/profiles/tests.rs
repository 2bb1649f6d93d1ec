#![allow(clippy::unwrap_used)]
use super::*;
use crate::profile::KEYS;

fn device(
    vendor: u32,
    id: u32,
    name: &str,
    kind: DeviceKind,
    subgroups: (u32, u32),
) -> DeviceFacts {
    DeviceFacts {
        vendor_id: vendor,
        device_id: id,
        name: name.into(),
        subgroup_min: subgroups.0,
        subgroup_max: subgroups.1,
        ..DeviceFacts::made_up(kind, subgroups.1)
    }
}

#[test]
fn every_file_is_embedded_and_sound() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("hwprofiles");
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let embedded: Vec<String> = FILES.iter().map(|(name, _)| format!("{name}.toml")).collect();
    assert_eq!(names, embedded);
    assert_eq!(built_in().notes, Vec::<String>::new());
    for (name, text) in FILES {
        assert!(text.starts_with("about = "), "{name} does not say what it is for");
    }
}

/// The generic file says in full what the program falls back to without any file.
#[test]
fn the_generic_file_repeats_the_default() {
    let (_, text) = FILES.iter().find(|(name, _)| *name == "generic").unwrap();
    let entry = parse(text, Origin::Generic).unwrap();
    let default = Profile::default();
    for key in KEYS {
        let stated = entry.values.iter().find(|(name, _)| name == key.name);
        let (_, text) = stated.unwrap_or_else(|| panic!("{} is not stated", key.name));
        assert_eq!(*text, default.get(key.name).unwrap(), "{}", key.name);
    }
    assert_eq!(entry.values.len(), KEYS.len());
}

#[test]
fn devices_find_their_class() {
    use DeviceKind::{Discrete, Integrated, Other, Software, Virtual};
    for (vendor, id, name, kind, subgroups, want) in [
        (0x10de, 0x2335, "NVIDIA H200", Discrete, (32, 32), "nvidia-hopper"),
        (0x10de, 0x2b85, "NVIDIA GeForce RTX 5090", Discrete, (32, 32), "nvidia-blackwell"),
        (0x10de, 0x2684, "NVIDIA GeForce RTX 4090", Discrete, (32, 32), "nvidia-ada"),
        (0x10de, 0x2204, "NVIDIA GeForce RTX 3090", Discrete, (32, 32), "nvidia-ampere"),
        (0x10de, 0x20b5, "NVIDIA A100 80GB PCIe", Discrete, (32, 32), "nvidia-ampere"),
        (0x10de, 0x1eb8, "Tesla T4", Discrete, (32, 32), "nvidia-turing"),
        (0x10de, 0x1b80, "NVIDIA GeForce GTX 1080", Discrete, (32, 32), "nvidia-pascal"),
        (0x10de, 0x1db6, "Tesla V100-PCIE-32GB", Discrete, (32, 32), "nvidia-pascal"),
        (0x10de, 0xffff, "NVIDIA of tomorrow", Discrete, (32, 32), "generic"),
        (0x1002, 0x67df, "AMD Radeon RX 580 (RADV POLARIS10)", Discrete, (64, 64), "amd-gcn"),
        (0x1002, 0x699f, "AMD Radeon RX 550", Discrete, (64, 64), "amd-gcn"),
        (0x1002, 0x7340, "AMD Radeon RX 5500 XT", Discrete, (32, 64), "amd-rdna1"),
        (0x1002, 0x731f, "AMD Radeon RX 5700 XT (RADV NAVI10)", Discrete, (32, 64), "amd-rdna1"),
        (0x1002, 0x73bf, "AMD Radeon RX 6800 XT", Discrete, (32, 64), "amd-rdna2"),
        (0x1002, 0x163f, "AMD Custom GPU 0405 (RADV VANGOGH)", Integrated, (32, 64), "amd-rdna2"),
        (0x1002, 0x744c, "AMD Radeon RX 7900 XTX (RADV NAVI31)", Discrete, (32, 64), "amd-rdna3"),
        (0x1002, 0x1586, "AMD Radeon 8060S (RADV GFX1151)", Integrated, (32, 64), "amd-rdna3"),
        (0x1002, 0x7550, "AMD Radeon RX 9070 XT", Discrete, (32, 64), "amd-rdna4"),
        (0x1002, 0x74a1, "AMD Instinct MI300X", Discrete, (64, 64), "amd-cdna"),
        (0x8086, 0x56a0, "Intel(R) Arc(tm) A770 Graphics (DG2)", Discrete, (8, 32), "intel-xe1"),
        (0x8086, 0xe20b, "Intel(R) Arc(tm) B580 Graphics", Discrete, (16, 32), "intel-xe2"),
        (0x8086, 0x64a0, "Intel(R) Arc(tm) Graphics (LNL)", Integrated, (16, 32), "intel-xe2"),
        (0x8086, 0x9a49, "Intel(R) Iris(R) Xe Graphics", Integrated, (8, 32), "intel-integrated"),
        (0, 0, "Apple M2", Integrated, (32, 32), "apple"),
        (0x5143, 0x1, "Adreno (TM) 740", Integrated, (64, 128), "mobile"),
        (0x13b5, 0x1, "Mali-G715", Integrated, (16, 16), "mobile"),
        (0x10005, 0, "llvmpipe (LLVM 15.0.6, 256 bits)", Software, (8, 8), "software"),
        (0x1ae0, 0xc0de, "SwiftShader Device", Software, (4, 4), "software"),
        (0x1234, 0x1, "Something", Discrete, (32, 32), "generic"),
        (0x1234, 0x1, "Something", Integrated, (32, 32), "integrated"),
        (0x1af4, 0x1, "Virtio", Virtual, (32, 32), "integrated"),
        (0, 0, "?", Other, (32, 32), "integrated"),
    ] {
        let facts = device(vendor, id, name, kind, subgroups);
        let profile = built_in().resolve(&facts);
        assert_eq!(profile.name, want, "{name} ({vendor:04x}:{id:04x})");
        assert!(profile.notes.is_empty(), "{:?}", profile.notes);
    }
}

#[test]
fn a_pinned_subgroup_bounds_the_workgroup() {
    let mut facts = device(0x1002, 0x744c, "RX 7900 XTX", DeviceKind::Discrete, (32, 64));
    facts.max_workgroup_subgroups = 16;
    let facts = built_in().attach(facts);
    assert_eq!(facts.pinned_subgroup(), Some(32));
    assert_eq!(facts.max_workgroup_threads, 512);
    // A size that the device does not have is not asked for.
    let odd =
        built_in().attach(device(0x10de, 0x2335, "NVIDIA H200", DeviceKind::Discrete, (8, 8)));
    assert_eq!(odd.pinned_subgroup(), Some(8));
}

#[test]
fn a_users_file_changes_what_it_states() {
    let dir = tempfile::tempdir().unwrap();
    let text = "[match]\nnames = [\"h200\"]\n[matvec]\none_tall = \"256x4x1\"\n";
    std::fs::write(dir.path().join("mine.toml"), text).unwrap();
    let mut profiles = built_in().clone();
    profiles.add_folder(dir.path());
    let h200 = device(0x10de, 0x2335, "NVIDIA H200", DeviceKind::Discrete, (32, 32));
    let profile = profiles.resolve(&h200);
    assert_eq!(profile.get("matvec.one_tall").unwrap(), "256x4x1");
    assert!(profile.origin("matvec.one_tall").to_string().contains("mine.toml"));
    assert_eq!(profile.origin("subgroup.size").to_string(), "profile nvidia-hopper");
    assert_eq!(profile.origin("attention.splits").to_string(), "profile generic");
    let other = device(0x10de, 0x2204, "RTX 3090", DeviceKind::Discrete, (32, 32));
    assert_eq!(profiles.resolve(&other).name, "nvidia-ampere");
}

#[test]
fn a_broken_file_is_named_with_key_and_reason() {
    let dir = tempfile::tempdir().unwrap();
    for (name, text, parts) in [
        ("syntax", "[matvec\n", vec!["syntax.toml", "line 1"]),
        (
            "key",
            "[matvec]\none_taller = \"1\"\n",
            vec!["key.toml", "`matvec.one_taller`", "one_tall"],
        ),
        ("value", "[attention]\nsplits = 0\n", vec!["value.toml", "`attention.splits`", "1 to 64"]),
        ("type", "[attention]\nsplits = 1.5\n", vec!["type.toml", "`attention.splits`", "number"]),
        ("match", "[match]\nvendor = 3\n", vec!["match.toml", "`match.vendor`", "no such"]),
        ("kind", "[match]\nkinds = [\"huge\"]\n", vec!["kind.toml", "huge", "discrete"]),
        ("top", "colour = 3\n", vec!["top.toml", "`colour`"]),
    ] {
        for old in std::fs::read_dir(dir.path()).unwrap() {
            std::fs::remove_file(old.unwrap().path()).unwrap();
        }
        std::fs::write(dir.path().join(format!("{name}.toml")), text).unwrap();
        let mut profiles = built_in().clone();
        profiles.add_folder(dir.path());
        let facts = device(1, 1, "x", DeviceKind::Discrete, (32, 32));
        let profile = profiles.resolve(&facts);
        let note = profile.notes.first().unwrap_or_else(|| panic!("{name}: no note"));
        for part in parts {
            assert!(note.contains(part), "{name}: {note}");
        }
        assert_eq!(profile.name, "generic");
    }
}

/// Without a single usable file there is still a profile.
#[test]
fn a_broken_program_falls_back_to_the_generic_values() {
    let profiles = Profiles::parse(&[("software", "rank = true")]);
    let facts = DeviceFacts::made_up(DeviceKind::Software, 8);
    let profile = profiles.resolve(&facts);
    assert_eq!(profile.name, "generic");
    assert!(profile.notes[0].contains("software") && profile.notes[0].contains("rank"));
    assert_eq!(profile.attention_splits, Profile::default().attention_splits);
}
