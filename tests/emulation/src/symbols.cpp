// SPDX-License-Identifier: Apache-2.0
// The library is loaded at an address of the system's choice; addr2line wants addresses as they
// stand in the file, so the load address is taken off.
#include "symbols.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdio>
#include <cstring>
#include <sstream>

namespace emu {
namespace {

struct Library {
    std::string path;
    uintptr_t base = 0;
    std::vector<Segment> segments;
};

int add_segments(dl_phdr_info* info, size_t, void* data) {
    Library* library = static_cast<Library*>(data);
    const uintptr_t here = reinterpret_cast<uintptr_t>(&add_segments);
    bool is_this_one = false;
    std::vector<Segment> segments;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const ElfW(Phdr) & header = info->dlpi_phdr[i];
        if (header.p_type != PT_LOAD) {
            continue;
        }
        const uintptr_t begin = info->dlpi_addr + header.p_vaddr;
        const uintptr_t end = begin + header.p_memsz;
        is_this_one |= here >= begin && here < end;
        segments.push_back({begin, end, (header.p_flags & PF_W) != 0});
    }
    if (is_this_one) {
        library->base = info->dlpi_addr;
        library->path = info->dlpi_name;
        library->segments = std::move(segments);
    }
    return is_this_one;
}

const Library& this_library() {
    static const Library library = [] {
        Library found;
        dl_iterate_phdr(add_segments, &found);
        return found;
    }();
    return library;
}

// Frames of the emulation's own inline functions stand between the runtime and the kernel's line.
bool is_kernel_line(const std::string& line) {
    return line.find("/emulation/include/") == std::string::npos &&
           line.find("/cuda/compat.cuh") == std::string::npos;
}

std::string without_directories(std::string line) {
    const size_t note = line.find(" (");  // "(discriminator 3)"
    if (note != std::string::npos) {
        line.resize(note);
    }
    const size_t slash = line.rfind('/');
    return slash == std::string::npos ? line : line.substr(slash + 1);
}

}  // namespace

void SourceLines::look_up(const std::vector<uintptr_t>& return_addresses) {
    std::vector<uintptr_t> asked;
    std::ostringstream command;
    // -i: with the functions that the line was inlined into; -a: an address before each answer
    command << "addr2line -a -i -e '" << this_library().path << "'" << std::hex;
    for (uintptr_t address : return_addresses) {
        if (address != 0 && known_.count(address) == 0) {
            // One byte back, since the call itself may be the last instruction of its line.
            command << " 0x" << address - 1 - this_library().base;
            asked.push_back(address);
        }
    }
    command << " 2>/dev/null";
    FILE* output = asked.empty() ? nullptr : popen(command.str().c_str(), "r");
    if (output == nullptr) {
        return;
    }
    char buffer[4096];
    size_t answers = 0;
    bool settled = false;
    while (std::fgets(buffer, sizeof(buffer), output) != nullptr) {
        std::string line(buffer, std::strcspn(buffer, "\n"));
        if (line.compare(0, 2, "0x") == 0) {
            ++answers;
            settled = false;
        } else if (answers != 0 && answers <= asked.size() && !settled) {
            // Inner frames come first; the last one stands if all are the emulation's own.
            settled = is_kernel_line(line);
            known_[asked[answers - 1]] = without_directories(line);
        }
    }
    pclose(output);
}

std::string SourceLines::find(uintptr_t return_address) const {
    auto found = known_.find(return_address);
    return found == known_.end() || found->second.empty() || found->second[0] == '?'
               ? "?"
               : found->second;
}

const std::vector<Segment>& library_segments() {
    return this_library().segments;
}

}  // namespace emu
