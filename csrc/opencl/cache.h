// Files that later processes find again: $XDG_CACHE_HOME/hyperhetero/opencl, or ~/.cache/...
//
// A cache is never needed: what cannot be read is made again, what cannot be written is not kept.
#pragma once

#include <optional>
#include <string>

namespace opencl {

// 16 hexadecimal digits that stand for the text.
std::string digest(const std::string& text);

// The content of a file that save_cached wrote in full; nothing if it is missing or damaged.
std::optional<std::string> load_cached(const std::string& name);
void save_cached(const std::string& name, const std::string& content);

}  // namespace opencl
