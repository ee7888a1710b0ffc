// SPDX-License-Identifier: Apache-2.0
// Reports are merged twice: by machine code while the kernel runs, which costs one look-up, and by
// source line when they are read.
#include "reports.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "symbols.h"

namespace emu {
namespace {

const char* name_of(Kind kind) {
    switch (kind) {
        case Kind::kRace:
            return "race";
        case Kind::kBounds:
            return "bounds";
        case Kind::kUninitialised:
            return "uninitialised";
        case Kind::kMisaligned:
            return "misaligned";
        case Kind::kBarrier:
            return "barrier";
        case Kind::kWarp:
            return "warp";
        case Kind::kDeadlock:
            return "deadlock";
        case Kind::kLivelock:
            return "livelock";
        case Kind::kTrap:
            return "trap";
        case Kind::kLimit:
            return "limit";
    }
    return "?";
}

std::string text_of_place(const Place& place, SourceLines& lines) {
    if (place.site.file != nullptr) {
        return text_of(place.site);
    }
    return place.code != 0 ? lines.find(place.code) : std::string();  // no such place
}

void replace(std::string& text, const char* pattern, const std::string& value) {
    for (size_t at = text.find(pattern); at != std::string::npos; at = text.find(pattern)) {
        text.replace(at, std::strlen(pattern), value);
    }
}

}  // namespace

ReportLog report_log;

std::string text_of(const Site& site) {
    const char* slash = std::strrchr(site.file, '/');
    return std::string(slash != nullptr ? slash + 1 : site.file) + ":" + std::to_string(site.line);
}

std::string name_of(const Thread& thread) {
    return "block " + std::to_string(thread.block->in_grid) + " thread " +
           std::to_string(thread.in_block) + " (warp " +
           std::to_string(thread.in_block / kWarpSize) + " lane " + std::to_string(thread.lane) +
           ")";
}

ReportLog::Key ReportLog::key_of(Kind kind, const Place& first, const Place& second) {
    return {kind, PlaceKey{first.site.file, first.site.line, first.code},
            PlaceKey{second.site.file, second.site.line, second.code}};
}

bool ReportLog::repeat(Kind kind, const Place& first, const Place& second) {
    auto found = index_.find(key_of(kind, first, second));
    if (found == index_.end()) {
        return false;
    }
    ++entries_[found->second].count;
    return true;
}

void ReportLog::add(Kind kind, const Place& first, const Place& second, std::string message) {
    if (!repeat(kind, first, second)) {
        index_[key_of(kind, first, second)] = entries_.size();
        entries_.push_back({kind, first, second, std::move(message), 1});
    }
}

std::string ReportLog::take() {
    static SourceLines lines;  // what was looked up once is kept
    std::vector<uintptr_t> codes;
    for (const Entry& entry : entries_) {
        codes.push_back(entry.first.code);
        codes.push_back(entry.second.code);
    }
    lines.look_up(codes);

    // One source line is often several instructions: reports of the same lines become one.
    struct Merged {
        std::string head, tail;
        uint64_t count;
    };
    std::vector<Merged> merged;
    std::map<std::tuple<Kind, std::string, std::string>, size_t> index;
    for (Entry& entry : entries_) {
        std::string first = text_of_place(entry.first, lines);
        std::string second = text_of_place(entry.second, lines);
        if (first.empty()) {
            first = "?";
        }
        replace(entry.message, "{0}", first);
        replace(entry.message, "{1}", second);
        // A race of two lines is one race, whichever came first in the schedule.
        auto ordered = std::minmax(first, second);
        auto added = index.emplace(
            std::tuple<Kind, std::string, std::string>(entry.kind, ordered.first, ordered.second),
            merged.size());
        if (!added.second) {
            merged[added.first->second].count += entry.count;
            continue;
        }
        const bool two = !second.empty() && second != first;
        merged.push_back({name_of(entry.kind),
                          (two ? first + "|" + second : first) + "\t" + entry.message,
                          entry.count});
    }
    entries_.clear();
    index_.clear();

    std::string text;
    for (const Merged& report : merged) {
        text += report.head + "\t" + std::to_string(report.count) + "\t" + report.tail + "\n";
    }
    return text;
}

}  // namespace emu
