// Stream sockets between the ranks of a tensor-parallel group.
//
// gather() sends this rank's piece to the others and receives theirs, all at the same time, so no
// order of the ranks can block. A rank that has ended closes its sockets: the others then get an
// error at once. A group that has failed stays failed, because its streams are no longer in step.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace verbatim {

class Mesh {
  public:
    // fds[r]: a connected stream socket to rank r; -1 for this rank. The caller closes them.
    Mesh(int rank, std::vector<int> fds);
    Mesh(const Mesh&) = delete;  // its counters are atomic
    int rank() const { return rank_; }
    int ranks() const { return (int)fds_.size(); }
    // Receives bytes[r] bytes of each other rank r into out[r], and sends `piece`, bytes[rank()]
    // long, to it. `root`: only rank 0 receives.
    void gather(const void* piece, const std::vector<size_t>& bytes, void* const* out, bool root);
    // Seconds in which rank r was late: this rank had to wait for its bytes. Any thread may ask.
    std::vector<double> waits() const;
    void broadcast(const void* data, size_t bytes);  // from this rank to the others' sockets

  private:
    // Sends and receives at the same time. Both are changed.
    struct Transfer {
        int fd, rank;
        char* at;
        size_t left;
        short event;  // POLLIN or POLLOUT
    };
    void transfer(std::vector<Transfer>& parts);
    [[noreturn]] void fail(const std::string& what);
    const int rank_;
    const std::vector<int> fds_;
    std::string failed_;
    std::vector<std::atomic<int64_t>> waited_ns_;
};

}  // namespace verbatim
