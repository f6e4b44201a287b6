// SPDX-License-Identifier: Apache-2.0
#include "cache/quarantine.h"

namespace kv_offload {

void Quarantine::hold(Ticket store, RowId row) noexcept {
  Row& held = at(row);
  add_hold(held);
  held.is_owned = false;
  held.next = held.next_list = 0;
  const Link link = row + 1;
  if (last_list_ != 0 && at(last_list_ - 1).ticket == store) {
    Row& first = at(last_list_ - 1);
    held.next = std::exchange(first.next, link);
    return;
  }
  held.ticket = store;
  (last_list_ == 0 ? first_list_ : at(last_list_ - 1).next_list) = link;
  last_list_ = link;
}

void Quarantine::hold_owned(RowId row) noexcept {
  Row& held = at(row);
  add_hold(held);
  held.is_owned = true;
}

void Quarantine::release(RowId row) {
  Row& held = at(row);
  if (held.holds == 0 || --held.holds > 0) return;
  --held_;
  if (!held.is_owned) free_(row);
}

void Quarantine::disown(RowId row) {
  at(row).is_owned = false;
  if (!holds(row)) free_(row);
}

void Quarantine::poll(const IsReported& is_reported) {
  last_list_ = 0;
  for (Link* list = &first_list_; *list != 0;) {
    const Row& first = at(*list - 1);
    if (!is_reported(first.ticket)) {
      last_list_ = *list;
      list = &at(*list - 1).next_list;
      continue;
    }
    Link link = std::exchange(*list, first.next_list);
    while (link != 0) release(std::exchange(link, at(link - 1).next) - 1);
  }
}

}  // namespace kv_offload
