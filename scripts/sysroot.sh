#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/sysroot.sh FOLDER
# Puts the C and the C++ library of Debian 11 into FOLDER, for cmake/sysroot.cmake. It needs apt and
# Debian's keyring, and no root. Environment: MIRROR (of Debian), CXX (whose libstdc++.a fills gaps).
set -euo pipefail
mkdir -p "$1"
folder=$(realpath "$1")
rm -rf "${folder:?}"
libraries=$folder/usr/lib/x86_64-linux-gnu
apt=$folder/apt
mkdir -p "$apt/lists/partial" "$apt/archives/partial"
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$keyring] ${MIRROR:-http://deb.debian.org/debian} bullseye main" >"$apt/sources"
options=(-qq -o APT::Architecture=amd64 -o APT::Architectures=amd64 -o "APT::Sandbox::User=$(id -un)"
  -o "Dir::State::lists=$apt/lists" -o Dir::State::status=/dev/null -o "Dir::Cache=$apt"
  -o "Dir::Etc::sourcelist=$apt/sources" -o Dir::Etc::sourceparts=/dev/null)
apt-get "${options[@]}" update
cd "$apt"
apt-get "${options[@]}" download libc6 libc6-dev linux-libc-dev libgcc-s1 libstdc++6
for package in *.deb; do
  dpkg-deb --extract "$package" "$folder"
done
rm -rf "$apt"

find "$folder" -type l -lname '/*' | while read -r link; do
  ln -snf "$folder$(readlink "$link")" "$link"
done
ln -s libstdc++.so.6 "$libraries/libstdc++.so"
# Debian 11's libstdc++ is newer than that of a system with glibc 2.28, in constructors alone that our
# libraries call. They take them from their own compiler, as gcc-toolset does (libstdc++_nonshared.a).
cd "$libraries"
ar x "$("${CXX:-g++}" -print-file-name=libstdc++.a)" sstream-inst.o
ar rcs libsstream.a sstream-inst.o
