# A compiler that was installed without the link to its shared C++ library takes the static one in
# silence. Each of our libraries would then have a copy of its own beside the one that torch has
# loaded, and a process in which some names are found in one copy and some in another crashes: at
# its first number printed, on an image of an H200. So the shared one, which torch needs, is named.
include_guard(GLOBAL)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT APPLE)
  execute_process(COMMAND "${CMAKE_CXX_COMPILER}" -print-file-name=libstdc++.so
    OUTPUT_VARIABLE LIBSTDCXX_LINK OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT IS_ABSOLUTE "${LIBSTDCXX_LINK}") # it is not there
    find_library(SHARED_LIBSTDCXX NAMES libstdc++.so.6)
    if(NOT SHARED_LIBSTDCXX)
      message(FATAL_ERROR "${CMAKE_CXX_COMPILER} has no shared C++ library (libstdc++.so), and "
        "this machine none named libstdc++.so.6; expected one of the two, which torch needs too")
    endif()
    link_libraries("${SHARED_LIBSTDCXX}")
  endif()
endif()
