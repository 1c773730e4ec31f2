# SPDX-License-Identifier: Apache-2.0
# Writes a copy of the kernels with one defect: cmake -D source=.. -D target=.. -D kernels=..
# -D file=.. -D from=.. -D to=.. -P defects.cmake. `from` must occur exactly once.
file(COPY ${source}/cuda DESTINATION ${target})
file(READ ${target}/cuda/${file} text)
string(FIND "${text}" "${from}" first)
string(FIND "${text}" "${from}" last REVERSE)
if(first EQUAL -1 OR NOT first EQUAL last)
  message(FATAL_ERROR "${file} has to hold once: ${from}")
endif()
string(REPLACE "${from}" "${to}" text "${text}")
file(WRITE ${target}/cuda/${file} "${text}")
file(TOUCH ${target}/cuda/${kernels}.cu)  # what the build looks at; copies keep their old times
